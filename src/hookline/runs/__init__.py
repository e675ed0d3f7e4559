"""Read, summarize and compare the records of runs: find them, read each file once, make curves, alerts and tables.

Imports the shared modules, and those modules of `record` that need no torch. Nothing in here imports
torch, so that commands which only read start quickly; the functions that return tensors import it when they are called.
"""
