"""The embedded default job: a small character-level GPT, trained on Python's own source text."""

from hookline.jobs.char_gpt import CharGPT
from hookline.jobs.sampling import generate
from hookline.jobs.stdlib_text import TextData, stdlib_text
from hookline.jobs.vocabulary import Vocabulary
from hookline.jobs.warmup_cosine import warmup_cosine

__all__ = ["CharGPT", "TextData", "Vocabulary", "generate", "stdlib_text", "warmup_cosine"]
