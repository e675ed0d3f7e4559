# ruff: noqa
"""Moved to hookline.core.failures."""

from hookline.core.failures import Incident as Incident
from hookline.core.failures import POLICIES as POLICIES
from hookline.core.failures import STRIKES as STRIKES
from hookline.core.failures import check_policy as check_policy
from hookline.core.failures import logger as logger

__all__ = ["Incident", "POLICIES", "STRIKES", "check_policy", "logger"]
