"""Generated text: reproducible, of the right length, and without traces in the model or the random state."""

import io
import random
import signal
from typing import Any

import pytest
import torch
from builders import make_trainer
from torch import Tensor, nn

from hookline import HooklineError, Trainer
from hookline.demo.char_gpt import CharGPT
from hookline.demo.sampling import generate
from hookline.demo.stdlib_text import Vocabulary

VOCAB = Vocabulary("abcdefgh ")


def model_of(dropout: float = 0.0) -> CharGPT:
    """A tiny untrained model."""
    torch.manual_seed(0)
    return CharGPT(len(VOCAB), context=6, width=16, layers=1, heads=2, dropout=dropout)


class Alphabet(nn.Module):
    """Answers every character with the next one of the vocabulary, and notes what it was shown."""

    def __init__(self, context: int = 4) -> None:
        super().__init__()
        self.context = context
        self.anything = nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Put all weight on the following character."""
        self.seen.append(input_ids[0].tolist())
        following = (input_ids + 1) % len(VOCAB)
        return {"logits": nn.functional.one_hot(following, len(VOCAB)) * 100.0}


def test_text_starts_with_the_prompt_and_has_the_length_asked_for() -> None:
    """The prompt comes back, followed by `length` new characters, beyond the model's context."""
    text = generate(model_of(), VOCAB, prompt="def ", length=20)
    assert text.startswith("def ")
    assert len(text) == 24


def test_the_model_decides_what_comes_next() -> None:
    """A model certain of the next letter is taken at its word."""
    assert generate(Alphabet(), VOCAB, prompt="a", length=5) == "abcdef"


def test_only_the_last_context_characters_are_shown() -> None:
    """The window slides: the model never sees more than `context` characters, and always the latest."""
    model = Alphabet(context=3)
    generate(model, VOCAB, prompt="abcde", length=2)
    assert model.seen == [VOCAB.encode("cde"), VOCAB.encode("def")]


def test_same_generator_state_gives_the_same_text() -> None:
    """Two generators with one seed give one text, another seed another text."""
    texts = [
        generate(model_of(), VOCAB, length=40, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_generator_goes_on_from_where_it_is() -> None:
    """Two samples from one generator differ: it is advanced, not rewound."""
    generator, model = torch.Generator().manual_seed(0), model_of()
    first = generate(model, VOCAB, length=40, generator=generator)
    assert generate(model, VOCAB, length=40, generator=generator) != first


def test_without_a_generator_the_text_is_the_same_every_time() -> None:
    """The default generator is created with a fixed seed each time."""
    assert generate(model_of(), VOCAB, length=40) == generate(model_of(), VOCAB, length=40)


def test_global_random_state_is_left_alone() -> None:
    """Sampling moves neither torch's nor Python's random state, even with a model that has dropout."""
    model = model_of(dropout=0.5)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    generate(model, VOCAB, length=10)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_every_module_gets_its_mode_back() -> None:
    """A module frozen in eval mode inside a model in training stays frozen, the others stay in train mode."""
    model = model_of(dropout=0.5)
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    generate(model, VOCAB, length=3)
    assert [module.training for module in model.modules()] == before


def test_mode_is_restored_after_an_error() -> None:
    """A model that fails half-way is still put back into training mode."""

    class Broken(Alphabet):
        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            assert not self.training
            raise ValueError("broken")

    model = Broken()
    with pytest.raises(ValueError, match="broken"):
        generate(model, VOCAB, prompt="a", length=3)
    assert model.training


def test_no_gradients_are_made() -> None:
    """Sampling records no graph and leaves no gradients."""
    model = model_of()
    generate(model, VOCAB, length=3)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_temperature_zero_is_greedy() -> None:
    """At temperature 0 the generator does not matter."""
    texts = {
        generate(model_of(), VOCAB, length=20, temperature=0, generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    }
    assert len(texts) == 1


def test_characters_unknown_to_the_vocabulary_stay_in_the_prompt() -> None:
    """The prompt is returned as it was given, also where the vocabulary does not know it."""
    assert generate(model_of(), VOCAB, prompt="Zé", length=2).startswith("Zé")


def test_empty_prompt_is_refused() -> None:
    """Without a character to start from there is nothing to continue."""
    with pytest.raises(HooklineError, match="prompt is empty"):
        generate(model_of(), VOCAB, prompt="")


def test_negative_temperature_is_refused() -> None:
    """A negative temperature is named in the error."""
    with pytest.raises(HooklineError, match=r"temperature=-1"):
        generate(model_of(), VOCAB, temperature=-1)


def test_a_model_without_context_is_refused() -> None:
    """The error names the model's class and the attribute it lacks."""
    with pytest.raises(HooklineError, match=r"Linear has no integer attribute `context`"):
        generate(nn.Linear(2, 2), VOCAB)


# ---- the hook ------------------------------------------------------------------------------------------------------

CODE_VOCAB = Vocabulary("def abc():\n")


def text_trainer(**options: Any) -> Trainer:
    """A run of two steps on random characters."""
    torch.manual_seed(0)
    model = CharGPT(len(CODE_VOCAB), context=8, width=8, layers=1, heads=1)
    ids = torch.randint(len(CODE_VOCAB), (2, 8))
    return make_trainer(model=model, data=[{"input_ids": ids, "labels": ids}] * 2, loss_fn=None, **options)


def test_a_sample_is_printed() -> None:
    """At the end of the run the prompt is continued by `length` characters, and the model is left as it was."""
    out, trainer = io.StringIO(), text_trainer()
    trainer.hook_data["vocab"] = CODE_VOCAB
    trainer.add_hook("sample_text", prompt="abc", length=20, stream=out)
    trainer.train()
    text = out.getvalue()
    assert text.startswith("\na sample, continued from 'abc':\n\nabc")
    assert len(text.partition("\n\n")[2].removesuffix("\n\n")) == 23
    assert trainer.model.training


def test_sampling_leaves_training_alone() -> None:
    """The weights are the same with and without the sample."""
    plain, sampled = text_trainer(), text_trainer()
    sampled.hook_data["vocab"] = CODE_VOCAB
    sampled.add_hook("sample_text", length=5, stream=io.StringIO())
    plain.train()
    sampled.train()
    pairs = zip(plain.model.parameters(), sampled.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_without_a_vocabulary_it_says_so() -> None:
    """A run whose data has no vocabulary gets an explanation instead of a sample."""
    out, trainer = io.StringIO(), text_trainer()
    trainer.add_hook("sample_text", stream=out)
    trainer.train()
    assert "no vocabulary" in out.getvalue()


def test_a_trial_run_prints_no_sample() -> None:
    """A fast_dev_run has learnt nothing to show, and has no vocabulary to complain of."""
    out, trainer = io.StringIO(), text_trainer(fast_dev_run=1)
    trainer.add_hook("sample_text", stream=out)
    trainer.train()
    assert out.getvalue() == ""


def test_after_a_failure_it_says_so() -> None:
    """A run that failed gets no sample."""
    out, trainer = io.StringIO(), text_trainer(debug=True)
    trainer.hook_data["vocab"] = CODE_VOCAB
    trainer.add_hook("sample_text", stream=out)

    @trainer.on("train_batch_end")
    def fail() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    assert out.getvalue() == "sample_text: no sample, because the run did not complete\n"


def test_after_a_signal_the_end_is_not_delayed() -> None:
    """The process is to end soon; a sample takes one forward pass per character."""
    out, trainer = io.StringIO(), text_trainer()
    trainer.hook_data["vocab"] = CODE_VOCAB
    trainer.add_hook("sample_text", stream=out)
    trainer.on("train_batch_end")(lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        trainer.train()
    assert out.getvalue() == "sample_text: no sample, because the run was interrupted\n"
