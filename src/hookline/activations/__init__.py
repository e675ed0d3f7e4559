"""Inside the forward pass: which modules are watched, and what reaches the hooks that watch them."""
