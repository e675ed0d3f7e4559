"""Between backward and step: the chain of update hooks."""
