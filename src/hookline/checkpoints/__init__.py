"""Save and load the state of a run: JSON and safetensors, written so that a crash at any moment loses nothing.

Knows nothing about trainers or hooks; imports `core` and the shared modules. `hooks`, `trainer` and the folders above
them may import it.
"""
