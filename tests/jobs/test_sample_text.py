"""The sample at the end of a run."""

import io
from typing import Any

import pytest
import torch

from hookline import get_trainer
from hookline.jobs.char_gpt import CharGPT
from hookline.jobs.sample_text import SampleText
from hookline.jobs.vocabulary import Vocabulary
from hookline.trainer.trainer import Trainer

VOCAB = Vocabulary.of_text("def abc():\n")


def make_trainer(**options: Any) -> Trainer:
    """A run of two steps on random characters."""
    torch.manual_seed(0)
    model = CharGPT(len(VOCAB), context=8, width=8, layers=1, heads=1)
    ids = torch.randint(len(VOCAB), (2, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return get_trainer(
        "simple",
        model,
        [{"input_ids": ids, "labels": ids}] * 2,
        optimizer,
        "cpu",
        record=False,
        console=False,
        **options,
    )


def test_a_sample_is_printed() -> None:
    """At the end of the run the prompt is continued by `length` characters, and the model is left as it was."""
    out, trainer = io.StringIO(), make_trainer()
    trainer.hook_data["vocab"] = VOCAB
    trainer.add_hook(SampleText(prompt="abc", length=20, stream=out))
    trainer.train()
    text = out.getvalue()
    assert text.startswith("\na sample, continued from 'abc':\n\nabc")
    assert len(text.partition("\n\n")[2].removesuffix("\n\n")) == 23
    assert trainer.model.training


def test_sampling_leaves_training_alone() -> None:
    """The weights are the same with and without the sample."""
    plain, sampled = make_trainer(), make_trainer()
    sampled.hook_data["vocab"] = VOCAB
    sampled.add_hook(SampleText(length=5, stream=io.StringIO()))
    plain.train()
    sampled.train()
    pairs = zip(plain.model.parameters(), sampled.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_without_a_vocabulary_it_says_so() -> None:
    """A run whose data has no vocabulary gets an explanation instead of a sample."""
    out, trainer = io.StringIO(), make_trainer()
    trainer.add_hook(SampleText(stream=out))
    trainer.train()
    assert "no vocabulary" in out.getvalue()


def test_a_trial_run_prints_no_sample() -> None:
    """A fast_dev_run has learnt nothing to show, and has no vocabulary to complain of."""
    out, trainer = io.StringIO(), make_trainer(fast_dev_run=1)
    trainer.add_hook(SampleText(stream=out))
    trainer.train()
    assert out.getvalue() == ""


def test_after_a_failure_it_says_so() -> None:
    """A run that failed gets no sample."""
    out, trainer = io.StringIO(), make_trainer(debug=True)
    trainer.hook_data["vocab"] = VOCAB
    trainer.add_hook(SampleText(stream=out))

    @trainer.on("train_batch_end")
    def fail() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    assert out.getvalue() == "sample_text: no sample, because the run did not complete\n"
