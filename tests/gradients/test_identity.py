"""Test the default update hook."""

import pytest
import torch

from hookline import Identity


@pytest.mark.req("000-21")
def test_identity_returns_what_it_got_and_does_not_count_as_intervening() -> None:
    """The same mapping is returned, and nothing is copied."""
    grads = {"weight": torch.ones(2)}
    assert Identity().on_update(grads) is grads and not Identity.intervenes
