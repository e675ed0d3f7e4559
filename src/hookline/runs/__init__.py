"""Read, summarize and compare the records of runs: find them, read each file once, make curves, alerts and tables.

Imports `record`, of which it uses the modules that need no torch, and the shared modules. Nothing in here imports
torch, so that commands which only read start quickly; the functions that return tensors import it when they are called.
"""
