"""Statistics of tensors, on their device."""
