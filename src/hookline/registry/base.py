# ruff: noqa
"""Moved to hookline.core.base."""

from hookline.core.base import ForwardHook as ForwardHook
from hookline.core.base import Hook as Hook
from hookline.core.base import TrainerHooks as TrainerHooks
from hookline.core.base import TrainingHook as TrainingHook
from hookline.core.base import UpdateHook as UpdateHook
from hookline.core.base import not_an_event as not_an_event
from hookline.core.base import passes_through as passes_through

__all__ = ["ForwardHook", "Hook", "TrainerHooks", "TrainingHook", "UpdateHook", "not_an_event", "passes_through"]
