"""Moved to hookline.demo."""

from hookline.demo import DATA as DATA
from hookline.demo import LOSSES as LOSSES
from hookline.demo import MODELS as MODELS
from hookline.demo import OPTIMIZERS as OPTIMIZERS
from hookline.demo import SCHEDULERS as SCHEDULERS
