"""Decide what happens when, and which hooks are called: events, signatures, schedules, order, dispatch and failures.

Imports only `errors` and the private helper modules next to it; every other folder may import it.
"""
