"""Benchmarks: what Hookline costs, measured beside a bare PyTorch loop and beside other trainers.

Run them with `python -m bench`. One module per question:

    overhead     microseconds per training step above a bare loop
    importtime   milliseconds that `import hookline` adds to `import torch`
"""
