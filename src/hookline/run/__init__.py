"""What hooks live in: `Run`, the class that a training loop drives, with its step methods, events, record and state."""
