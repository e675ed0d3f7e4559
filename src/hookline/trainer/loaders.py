"""Moved to data/loaders.py."""

from hookline.trainer.data.loaders import Loaders, epoch_length
from hookline.trainer.data.loaders import make_train_loaders as to_train_on

__all__ = ["Loaders", "epoch_length", "to_train_on"]
