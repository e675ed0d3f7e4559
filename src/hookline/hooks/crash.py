"""Moved to hookline.hooks.nan_forensics.dump."""

from hookline.hooks.nan_forensics.dump import Replay as Replay
from hookline.hooks.nan_forensics.dump import read_crash as read_crash
from hookline.hooks.nan_forensics.dump import replay_crash as replay_crash
