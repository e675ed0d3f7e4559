"""Benchmarks: what Hookline costs, measured beside a bare PyTorch loop and beside other trainers.

Run them with `python -m bench`. One module per question:

    overhead     microseconds per training step above a bare loop
    dispatch     microseconds per event
    importtime   milliseconds that `import hookline` adds to `import torch`
    statistics   statistics of every output and every gradient, at every step
    gradients    the gradient monitor
    chain        hooks that change gradients
    capture      capturing every module's output
    compiled     a monitor inside a compiled model
    checkpoint   saving, in the foreground and in the background
    monitors     all monitors together

What they share: interleave.py and turns.py take turns, watched.py is a GPT that watchers.py watch, table.py prints.
"""
