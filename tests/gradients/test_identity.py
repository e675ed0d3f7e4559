"""Test the default update hook."""

from collections.abc import Callable
from typing import Any

import pytest

from hookline.gradients.transforms import Identity
from hookline.gradients.view import Gradients


@pytest.mark.req("000-21")
def test_identity_returns_what_it_got_and_does_not_count_as_intervening(params: Callable[..., Any]) -> None:
    """The same mapping is returned, and nothing is copied."""
    grads = Gradients(params())
    assert Identity().on_update(grads) is grads and not Identity.intervenes
