"""What the folders above provide for this one, which knows none of them: references that are loaded on first use.

`hookline/__init__.py` fills the table, and is imported before any other module.
"""

PROVIDED: dict[str, str] = {}
"""``"module:attribute"`` of the table of built-ins of each kind, by its plural, and of functions that read configs."""
