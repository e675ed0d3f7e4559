"""References to objects in the folders above, which `core` does not import: each is loaded on first use.

`hookline/__init__.py` fills the table, and is imported before any other module.
"""

PROVIDED: dict[str, str] = {}
"""``"module:attribute"`` of the table of built-ins of each kind, by its plural, and of functions that read configs."""
