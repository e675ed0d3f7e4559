"""The one training loop and what it needs: trainer, run, validation, checkpointing, and the data it reads.

Imports `core`, `gradients`, `record` and `checkpoints`; it refers to no hook by its class. `build` and what is above it
may import this folder.
"""
