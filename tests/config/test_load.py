"""Loading configs from files and dicts, and applying overrides."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import load_config
from hookline.errors import ConfigError

WANTED = {"model": {"name": "m", "width": 8}, "trainer": {"max_steps": 3}}
FORMS = {
    "run.yaml": "model: {name: m, width: 8}\ntrainer: {max_steps: 3}\n",
    "run.yml": "model:\n  name: m\n  width: 8\ntrainer:\n  max_steps: 3\n",
    "run.toml": '[model]\nname = "m"\nwidth = 8\n[trainer]\nmax_steps = 3\n',
    "run.json": '{"model": {"name": "m", "width": 8}, "trainer": {"max_steps": 3}}',
}


@pytest.mark.req("004-27")
@pytest.mark.parametrize("name", FORMS)
def test_all_formats_give_the_same_config(name: str) -> None:
    """YAML, TOML and JSON give the same mapping, marked as read from a file."""
    Path(name).write_text(FORMS[name], encoding="utf-8")
    assert load_config(name) == (WANTED, True)
    assert load_config(Path(name), ["trainer.max_steps=4"])[0]["trainer"]["max_steps"] == 4


def test_a_dict_counts_as_code_and_is_not_changed() -> None:
    """A dict counts as code, and overrides change a copy of it."""
    given = {"model": {"name": "m"}}
    assert load_config(given, ["model.width=3"]) == ({"model": {"name": "m", "width": 3}}, False)
    assert given == {"model": {"name": "m"}}


def test_an_override_changes_one_place_of_a_shared_value() -> None:
    """A dict that is in two places of a config is copied, so that changing one leaves the other as it is."""
    shared = {"name": "m", "size": 1}
    tree, _ = load_config({"model": shared, "data": shared}, ["model.size=2"])
    assert (tree["model"]["size"], tree["data"]["size"]) == (2, 1)


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S"), include_characters=" "), max_size=9)
TREES = st.recursive(
    PLAIN | TEXT, lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3), max_leaves=9
)


@settings(max_examples=100, deadline=None)
@given(tree=st.dictionaries(TEXT, TREES, max_size=3), indent=st.sampled_from([None, 2, "\t"]), ascii_only=st.booleans())
def test_json_is_read_as_python_reads_it(tree: dict[str, Any], indent: int | str | None, ascii_only: bool) -> None:
    """JSON files go through the YAML reader: numbers, escapes, rare characters and tabs mean the same there."""
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_only)
    Path("x.json").write_text(text, encoding="utf-8")
    assert json.dumps(load_config("x.json")[0]) == json.dumps(tree)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("list.yaml", b"- 1\n", "expected a mapping with model"),
        ("empty.yaml", b"", "it is empty"),
        ("word.json", b'"x"', "expected a mapping"),
        ("bad.toml", b"a = = 1", "not valid TOML"),
        ("bad.json", b"{", "not valid YAML"),
        ("twice.json", b'{\n"a": 1,\n"a": 2}', "line 3: the key 'a' appears twice (first on line 2)"),
        ("deep.json", b'{"a":' + b"[" * 60 + b"]" * 60 + b"}", "deeper"),
        ("deeper.json", b"[" * 200_000, "deeper"),
        ("wide.json", b'{"a": [' + b"1," * 100_000 + b"1]}", "more than 10000 values"),
        ("bytes.yaml", b"a: \xff\xfe", "UTF-8"),
        ("huge.yaml", b"#" * 250_001, "it has 250,001 bytes, and 250,000 is the limit; move"),
        ("run.txt", b"a: 1", "is not the name of a config file"),
    ],
)
def test_wrong_files_are_named(name: str, content: bytes, words: str) -> None:
    """A file that cannot be used is reported by its name and what is wrong with it."""
    Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert caught.value.path == name
    assert words in caught.value.problem


def test_a_missing_file_is_named() -> None:
    """A missing file, or a directory in its place, is a config error and not a traceback."""
    Path("dir.yaml").mkdir()
    for name in ("none.yaml", "dir.yaml"):
        with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
            load_config(name)


def tree() -> dict[str, Any]:
    """Return a config with every kind of entry."""
    return {
        "model": "char_gpt",
        "data": {"name": "stdlib_text", "sizes": [1, 2]},
        "hooks": {
            "lifecycle": ["console_log", {"name": "checkpoint", "save_every_n_steps": 5}],
            "update": [{"name": "clip_norm", "max_norm": 1.0}, {"name": "clip_norm", "as": "second", "max_norm": 2.0}],
        },
    }


def test_one_override_need_not_be_in_a_list() -> None:
    """Text is one override, not a sequence of letters."""
    assert load_config(tree(), "trainer.max_steps=7")[0]["trainer"]["max_steps"] == 7


def changed(*overrides: str) -> dict[str, Any]:
    """Return the config above after some overrides."""
    return load_config(tree(), overrides)[0]


def test_overrides_address_numbered_hooks() -> None:
    """A second hook of a type has its number in overrides, too."""
    given = {"hooks": {"update": ["sign", {"name": "noise"}, "sign"], "lifecycle": ["sign"]}}
    made = load_config(given, ["hooks.sign_3.params=x", "hooks.sign.params=y"])[0]["hooks"]
    assert made["update"][2] == {"name": "sign", "params": "x"} and made["lifecycle"] == [
        {"name": "sign", "params": "y"}
    ]


def test_values_are_read_as_yaml() -> None:
    """Values are read as numbers, true and false, null, lists or text; a pattern stays text."""
    data = changed(
        "data.a=5e-3", "data.b=true", "data.c=null", "data.d=[1, x]", "data.e=*.txt", "data.f=a=b", "data.g=${env:X}"
    )["data"]
    assert [data[key] for key in "abcdefg"] == [5e-3, True, None, [1, "x"], "*.txt", "a=b", "${env:X}"]


def test_missing_sections_are_added_and_lists_are_indexed() -> None:
    """A section that is missing is added; a part of a path that is a number is the index into a list."""
    made = changed("trainer.max_steps=3", "data.sizes.1=7", "hooks.lifecycle.1.save_every_n_steps=9")
    assert made["trainer"] == {"max_steps": 3}
    assert made["data"]["sizes"] == [1, 7]
    assert made["hooks"]["lifecycle"][1]["save_every_n_steps"] == 9


def test_a_bare_name_gets_parameters() -> None:
    """A component or hook that is given as a bare name becomes a mapping when a parameter is set."""
    made = changed("model.width=8", "hooks.console_log.log_every_n_batches=2", "hooks.lifecycle.0.enabled=false")
    assert made["model"] == {"name": "char_gpt", "width": 8}
    assert made["hooks"]["lifecycle"][0] == {"name": "console_log", "log_every_n_batches": 2, "enabled": False}


def test_a_hook_is_found_by_its_name_in_any_list() -> None:
    """A path finds a hook by its `as`, or else by its name, in any of the lists."""
    update = changed("hooks.clip_norm.max_norm=0.5", "hooks.second.max_norm=0.25")["hooks"]["update"]
    assert [hook["max_norm"] for hook in update] == [0.5, 0.25]


def test_the_first_of_several_hooks_with_a_name_is_changed() -> None:
    """A name stands for the first entry that has it, in the order lifecycle, forward, update and in each list."""
    twice = [{"name": "scale", "factor": 1}, {"name": "scale", "factor": 2}]
    config, _ = load_config({"hooks": {"update": twice}}, ["hooks.scale.factor=9"])
    assert [hook["factor"] for hook in config["hooks"]["update"]] == [9, 2]
    config, _ = load_config({"hooks": {"update": twice, "lifecycle": ["scale"]}}, ["hooks.scale.factor=9"])
    assert config["hooks"] == {"update": twice, "lifecycle": [{"name": "scale", "factor": 9}]}


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("trainr.max_steps=1", "trainr", "did you mean 'trainer'"),
        ("trainer.max_stesp=1", "trainer.max_stesp", "did you mean 'max_steps'"),
        ("hooks.clip_nrm.max_norm=1", "hooks.clip_nrm", "did you mean 'clip_norm'"),
        ("hooks.clip_norm=1", "hooks.clip_norm", "hooks.clip_norm.PARAMETER=value"),
        ("hooks.update.7.max_norm=1", "hooks.update.7", "list of 2"),
        ("hooks.update.2.max_norm=1", "hooks.update.2", "list of 2, counted from 0"),  # one past the last
        ("data.sizes.2=7", "data.sizes.2", "list of 2, counted from 0"),
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
    """An override whose path does not exist is refused, and the message names the nearest path that does."""
    with pytest.raises(ConfigError) as caught:
        changed(override)
    assert caught.value.path == path
    assert words in caught.value.problem
