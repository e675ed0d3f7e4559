"""Moved to hookline.demo.char_gpt."""

from hookline.demo.char_gpt import CharGPT as CharGPT
