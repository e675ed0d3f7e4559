"""Transform gradients between the backward pass and the optimizer step.

The chain runs the update hooks; `transforms` has the built-in ones. Imports `core` and `stats`; `hooks` and everything
above may import it.
"""
