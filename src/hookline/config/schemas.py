"""Moved to hookline.config.schema."""

from hookline.config.schema import HooksConfig as HooksConfig
from hookline.config.schema import RunConfig as RunConfig
from hookline.config.schema import TrainerConfig as TrainerConfig
from hookline.config.schema import as_run_config as as_run_config
