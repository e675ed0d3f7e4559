"""The log without secrets."""

import io
import logging

import pytest
import torch

from hookline import get_trainer
from hookline.record.known_secrets import KnownSecrets
from hookline.record.redacted_log import secrets_kept_out

TOKEN = "q8Xw2Zr5Tn1Lk7Vb3Mc9Pd4s"
logger = logging.getLogger("hookline")


@pytest.fixture
def written() -> io.StringIO:
    """What the log writes, formatted as a console has it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield stream  # type: ignore[misc]
    logger.removeHandler(handler)


def test_a_hook_that_quotes_a_secret_fails_without_it(written: io.StringIO) -> None:
    """Neither its message nor its traceback shows it; the run over, the log is left alone."""
    known = KnownSecrets()
    known.learn([(TOKEN, "<redacted>")])
    model = torch.nn.Linear(3, 1)
    data = [(torch.randn(4, 3), torch.randn(4, 1))]
    trainer = get_trainer(
        "simple", model, data, torch.optim.SGD(model.parameters(), 0.1), "cpu",
        loss_fn=torch.nn.functional.mse_loss, record=False, console=False,
    )  # fmt: skip

    def quotes() -> None:
        raise ConnectionError(f"401 for {TOKEN}")

    trainer.on("step_end", name="quotes")(quotes)
    trainer.train()
    text = written.getvalue()
    assert "ConnectionError: 401 for <redacted>" in text and "Traceback" in text and TOKEN not in text
    assert logger.filters == []


def test_the_last_of_several_runs_takes_the_filter_away() -> None:
    """They may overlap, one inside another or side by side."""
    with secrets_kept_out():
        with secrets_kept_out():
            pass
        assert len(logger.filters) == 1
    assert logger.filters == []
