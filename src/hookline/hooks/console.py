"""Moved to hookline.hooks.console_log."""

from hookline.hooks.console_log import ConsoleLogHook as ConsoleLogHook
from hookline.hooks.console_log import print_costs as print_costs
