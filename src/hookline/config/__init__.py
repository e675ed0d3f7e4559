"""Configuration: read from a file or a dict, checked against schemas, with errors that name the dotted path.

Imports `core` and the trainer's options. `build`, `cli` and `demo` may import it; `core` reaches it only by name, when
a hook is created from a config.
"""
