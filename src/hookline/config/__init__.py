"""Configuration: read from a file or a dict, checked against schemas, with errors that name the dotted path."""
