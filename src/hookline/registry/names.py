# ruff: noqa
"""Moved to hookline.core.plugins."""

from hookline.core.plugins import DATA as DATA
from hookline.core.plugins import HOOKS as HOOKS
from hookline.core.plugins import LOSSES as LOSSES
from hookline.core.plugins import MODELS as MODELS
from hookline.core.plugins import OPTIMIZERS as OPTIMIZERS
from hookline.core.plugins import PluginTable as Names
from hookline.core.plugins import SCHEDULERS as SCHEDULERS
from hookline.core.plugins import TRAINERS as TRAINERS
from hookline.core.plugins import load_reference as load_reference
from hookline.core.plugins import register_data as register_data
from hookline.core.plugins import register_hook as register_hook
from hookline.core.plugins import register_loss as register_loss
from hookline.core.plugins import register_model as register_model
from hookline.core.plugins import register_optimizer as register_optimizer
from hookline.core.plugins import register_scheduler as register_scheduler
from hookline.core.plugins import register_trainer as register_trainer

__all__ = ["DATA", "HOOKS", "LOSSES", "MODELS", "Names", "OPTIMIZERS", "SCHEDULERS", "TRAINERS", "load_reference", "register_data", "register_hook", "register_loss", "register_model", "register_optimizer", "register_scheduler", "register_trainer"]
