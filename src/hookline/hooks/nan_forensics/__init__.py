"""Find where a NaN comes from, and write what is needed to reproduce it."""
