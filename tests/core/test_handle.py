"""A handle is the hook's name and can remove it."""

import copy
import json
import pickle

import pytest
from idle_hook import Idle

from hookline import HookRegistry


def test_a_handle_is_the_name() -> None:
    """It compares, hashes, prints and serialises as the string it is."""
    handle = HookRegistry().register(Idle("mine"))
    assert handle == "mine" and {handle: 1}["mine"] == 1 and f"{handle}" == "mine"
    assert json.dumps([handle]) == '["mine"]'


def test_copies_are_plain_names() -> None:
    """A config that holds a handle can be copied and sent to another process."""
    handle = HookRegistry().register(Idle("mine"))
    for copied in (copy.copy(handle), copy.deepcopy({"id": handle})["id"], pickle.loads(pickle.dumps(handle))):
        assert copied == "mine" and type(copied) is str


def test_removing_twice_is_harmless(registry: HookRegistry) -> None:
    """The second call does nothing."""
    handle = registry.register(Idle("mine"))
    handle.remove()
    handle.remove()
    assert "mine" not in registry


def test_a_with_block_removes_at_its_end_also_on_errors(registry: HookRegistry) -> None:
    """The hook lives as long as the block, and the block's error continues."""
    with pytest.raises(ValueError, match="inside"), registry.register(Idle("mine")) as name:
        assert name in registry
        raise ValueError("inside")
    assert "mine" not in registry


def test_an_old_handle_does_not_remove_its_successor(registry: HookRegistry) -> None:
    """A handle removes the hook it was returned for, not one that took the name later."""
    old = registry.register(Idle("mine"))
    registry.remove("mine")
    registry.register(Idle("mine"))
    old.remove()
    assert "mine" in registry
