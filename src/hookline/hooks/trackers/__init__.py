"""Trackers: hooks that send the record of a run to TensorBoard, Weights & Biases, trackio or MLflow."""
