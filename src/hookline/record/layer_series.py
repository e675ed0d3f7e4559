"""Moved to hookline.record.reader."""

from hookline.record.reader import LayerSeries as LayerSeries
from hookline.record.reader import read_layers as read_layers
