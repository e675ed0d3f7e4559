"""Text from a trained character model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.jobs.vocabulary import Vocabulary


def generate(
    model: nn.Module,
    vocab: Vocabulary,
    prompt: str = "def ",
    length: int = 300,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> str:
    """Continue `prompt` by `length` characters and return both.

    The model is any that has an integer `context` and answers `model(input_ids)` with `{"logits": …}`. It
    runs in eval mode without gradients and is left as it was found. All randomness comes from `generator`
    (without one, the same text every time); the global streams are never touched. `temperature=0` takes the
    likeliest character. Costs one forward pass per character, on `device` (by default where the model is).
    """
    if not prompt:
        raise HooklineError("generate: the prompt is empty; give at least one character, for instance '\\n'")
    if temperature < 0:
        raise HooklineError(f"generate: temperature={temperature} is negative; the least is 0, greedy choice")
    context = _context_of(model)
    generator = generator or torch.Generator().manual_seed(0)
    ids = torch.tensor([vocab.encode(prompt)], device=device or next(model.parameters()).device)
    with torch.no_grad(), _eval_mode(model):
        for _ in range(length):
            logits = model(ids[:, -context:])["logits"][:, -1]
            ids = torch.cat([ids, _draw(logits, temperature, generator).to(ids.device)], dim=1)
    return prompt + vocab.decode(ids[0, len(prompt) :].tolist())


def _context_of(model: nn.Module) -> int:
    context = getattr(model, "context", None)
    if not isinstance(context, int):
        raise HooklineError(
            f"generate: {type(model).__name__} has no integer attribute `context`; "
            "set it to the number of characters that the model can read at once"
        )
    return context


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Choose one id per row, on the generator's device: a CPU generator gives a GPU model the same draws."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    scaled = logits.float().to(generator.device) / temperature
    return torch.multinomial(scaled.softmax(dim=-1), num_samples=1, generator=generator)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, then give every module its own flag back (some may be frozen in eval)."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
