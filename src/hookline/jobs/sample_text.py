"""Showing what a character model has learnt."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from hookline.hooks.named_hook import is_trial
from hookline.registry.base import TrainingHook


class SampleText(TrainingHook):
    """Prints a text that the model writes when the run ends. Needs the data's vocabulary, in trainer.hook_data."""

    built_in = True
    name = "sample_text"

    def __init__(
        self, prompt: str = "def ", length: int = 300, temperature: float = 0.8, stream: TextIO | None = None
    ) -> None:
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self._stream = stream

    def on_train_end(self, trainer: Any, state: Mapping[str, Any]) -> None:
        if is_trial(trainer):
            return
        vocab = trainer.hook_data.get("vocab")
        if state["status"] == "error":
            self._print("sample_text: no sample, because the run did not complete")
        elif vocab is None:
            self._print("sample_text: no sample, because the data has no vocabulary (trainer.hook_data['vocab'])")
        else:
            self._print(f"\na sample, continued from {self.prompt!r}:\n\n{self._sample(trainer, vocab)}\n")

    def _sample(self, trainer: Any, vocab: Any) -> str:
        from hookline.jobs.sampling import generate

        with trainer.inference() as model:
            return generate(model, vocab, self.prompt, self.length, self.temperature)

    def _print(self, text: str) -> None:
        print(text, file=self._stream or sys.stdout, flush=True)
