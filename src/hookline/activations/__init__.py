"""Hooks inside the forward pass: capture, monitoring, debugging, interventions, and how they are called.

Imports `core` and `stats`. `hooks` and every folder above it may import this one. `compile/` holds everything that
touches Dynamo or inductor, and runs only in processes that compile something.
"""
