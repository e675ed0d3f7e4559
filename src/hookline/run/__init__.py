"""`Run`, which hooks live in and a training loop drives, with its step methods, events, record and state."""
