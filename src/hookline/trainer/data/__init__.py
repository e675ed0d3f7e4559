"""Read batches: loaders by name, mixed or one after another, with a position from which a run resumes exactly."""
