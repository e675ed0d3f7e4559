"""Where hooks live: base classes, names, order, switches, and the tables that events are fired through."""
