"""Decide what happens when, and who is called: events, signatures, schedules, order, dispatch and failures.

Imports only `errors` and the private helper modules beside it; every other folder may import it.
"""
