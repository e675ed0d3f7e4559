"""Generate text with a trained character model, and a hook that does so when a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import nn

from hookline._console import print_line
from hookline.core.base import TrainingHook
from hookline.errors import HooklineError
from hookline.run.control import eval_mode

if TYPE_CHECKING:
    from hookline.demo.stdlib_text import Vocabulary
    from hookline.run.control import RunControl


class SampleText(TrainingHook):
    """Prints text that the model generates when the run ends. Needs the data's vocabulary in `trainer.hook_data`."""

    built_in = True
    name = "sample_text"

    def __init__(
        self, prompt: str = "def ", length: int = 300, temperature: float = 0.8, stream: TextIO | None = None
    ) -> None:
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self._stream = stream

    def on_train_end(self, trainer: RunControl, state: Mapping[str, Any]) -> None:
        """Print the sample, or why there is none."""
        if trainer.is_trial_run:
            return
        vocab = trainer.hook_data.get("vocab")
        if state["status"] == "error":
            text = "sample_text: no sample, because the run did not complete"
        elif trainer.stopped_by == "signal":  # the process should end soon
            text = "sample_text: no sample, because the run was interrupted"
        elif vocab is None:
            text = "sample_text: no sample, because the data has no vocabulary (trainer.hook_data['vocab'])"
        else:
            with trainer.inference() as model:
                sample = generate(model, vocab, self.prompt, self.length, self.temperature)
            text = f"\na sample, continued from {self.prompt!r}:\n\n{sample}\n"
        if trainer.ranks.rank == 0:  # the others take part in the model's forward passes
            print_line(text, self._stream)


def generate(
    model: nn.Module,
    vocab: Vocabulary,
    prompt: str = "def ",
    length: int = 300,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
) -> str:
    """Continue a prompt character by character, at the cost of one forward pass each.

    The model runs in eval mode without gradients, and its training flags are restored afterwards.

    Args:
        model: Any model that has an integer `context` and returns `{"logits": …}` for `model(input_ids)`.
        vocab: The vocabulary that the model was trained with.
        prompt: The text to continue; at least one character.
        length: How many characters to generate.
        temperature: Divides the logits; 0 takes the most likely character.
        generator: The only source of randomness; without one, the text is the same every time.

    Returns:
        The prompt and its continuation.

    Raises:
        HooklineError: If the prompt is empty, the temperature negative, or the model has no `context`.
    """
    if not prompt:
        raise HooklineError("generate: the prompt is empty; pass at least one character, for instance '\\n'")
    if temperature < 0:
        raise HooklineError(f"generate: temperature={temperature} is negative; the minimum is 0 (greedy choice)")
    context = getattr(model, "context", None)
    if not isinstance(context, int):
        raise HooklineError(
            f"generate: {type(model).__name__} has no integer attribute `context`; "
            "set it to the number of characters that the model can read at once"
        )
    generator = generator or torch.Generator().manual_seed(0)
    ids = torch.tensor([vocab.encode(prompt)], device=next(model.parameters()).device)
    with eval_mode(model):
        for _ in range(length):
            logits = model(ids[:, -context:])["logits"][:, -1]
            if temperature == 0:
                drawn = logits.argmax(dim=-1, keepdim=True)
            else:  # drawn on the generator's device: a CPU generator gives a GPU model the same draws
                weights = (logits.float().to(generator.device) / temperature).softmax(dim=-1)
                drawn = torch.multinomial(weights, num_samples=1, generator=generator)
            ids = torch.cat([ids, drawn.to(ids.device)], dim=1)
    return prompt + vocab.decode(ids[0, len(prompt) :].tolist())
