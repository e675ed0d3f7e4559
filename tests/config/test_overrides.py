"""Changing one value of a configuration."""

from typing import Any

import pytest

from hookline.config.overrides import apply_override
from hookline.errors import ConfigError


def tree() -> dict[str, Any]:
    """A configuration with every kind of entry."""
    return {
        "model": "char_gpt",
        "data": {"name": "stdlib_text", "sizes": [1, 2]},
        "hooks": {
            "lifecycle": ["console_log", {"name": "checkpoint", "save_every_n_steps": 5}],
            "update": [{"name": "clip_norm", "max_norm": 1.0}, {"name": "clip_norm", "as": "second", "max_norm": 2.0}],
        },
    }


def changed(*overrides: str) -> dict[str, Any]:
    """The tree after some overrides."""
    made = tree()
    for override in overrides:
        apply_override(made, override)
    return made


def test_values_are_read_as_yaml() -> None:
    """Numbers, switches, null, lists and words are distinguished; a pattern stays text."""
    data = changed(
        "data.a=5e-3", "data.b=true", "data.c=null", "data.d=[1, x]", "data.e=*.txt", "data.f=a=b", "data.g=${env:X}"
    )["data"]
    assert [data[key] for key in "abcdefg"] == [5e-3, True, None, [1, "x"], "*.txt", "a=b", "${env:X}"]


def test_keys_are_made_and_lists_are_indexed() -> None:
    """A section that is not there is made; a list is entered by index."""
    made = changed("trainer.max_steps=3", "data.sizes.1=7", "hooks.lifecycle.1.save_every_n_steps=9")
    assert made["trainer"] == {"max_steps": 3}
    assert made["data"]["sizes"] == [1, 7]
    assert made["hooks"]["lifecycle"][1]["save_every_n_steps"] == 9


def test_a_bare_name_gets_parameters() -> None:
    """A component or hook that was given by its name alone becomes a mapping."""
    made = changed("model.width=8", "hooks.console_log.log_every_n_batches=2", "hooks.lifecycle.0.enabled=false")
    assert made["model"] == {"name": "char_gpt", "width": 8}
    assert made["hooks"]["lifecycle"][0] == {"name": "console_log", "log_every_n_batches": 2, "enabled": False}


def test_hooks_are_addressed_by_instance() -> None:
    """A hook is found by `as`, else by name, in whichever list it is."""
    update = changed("hooks.clip_norm.max_norm=0.5", "hooks.second.max_norm=0.25")["hooks"]["update"]
    assert [hook["max_norm"] for hook in update] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("trainr.max_steps=1", "trainr", "did you mean 'trainer'"),
        ("trainer.max_stesp=1", "trainer.max_stesp", "did you mean 'max_steps'"),
        ("hooks.clip_nrm.max_norm=1", "hooks.clip_nrm", "did you mean 'clip_norm'"),
        ("hooks.clip_norm=1", "hooks.clip_norm", "hooks.clip_norm.PARAMETER=value"),
        ("hooks.update.7.max_norm=1", "hooks.update.7", "list of 2"),
        ("hooks.update.x.max_norm=1", "hooks.update.x", "list of 2"),
        ("data.name.x=1", "data.name", "'stdlib_text' (str)"),
        ("max_steps", "", "write a.b=value"),
        ("a..b=1", "", "write a.b=value"),
        ("data.x=", "data.x", "write data.x=null for no value"),
        ("data.x= ", "data.x", "write data.x=null for no value"),
        ("data.x=[1", "data.x", "is not valid YAML"),
        ("data.x=[!!python/name:os.system ]", "data.x", "refused"),
    ],
)
def test_wrong_overrides(override: str, path: str, words: str) -> None:
    """A path that leads nowhere is refused with the nearest that does, and nothing is changed."""
    made = tree()
    with pytest.raises(ConfigError) as caught:
        apply_override(made, override)
    assert caught.value.path == path
    assert words in caught.value.problem
    assert made == tree()
