"""Inside the forward pass: which modules have hooks, and what reaches the hooks that are called after them."""
