"""Trackers: hooks that send the record of a run to TensorBoard, Weights & Biases, trackio or MLflow.

To add one, write a subclass of `Tracker` here, and list it in hooks/__init__.py and hookline/__init__.py.
"""
