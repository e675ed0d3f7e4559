"""Find where a NaN comes from, and write the files that reproduce it."""
