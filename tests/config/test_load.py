"""From files and dicts to one mapping."""

from pathlib import Path

import pytest

from hookline.config.load import MAX_BYTES, load_config
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
def test_all_formats_say_the_same(name: str) -> None:
    """YAML, TOML and JSON lead to the same mapping, known to come from a file."""
    Path(name).write_text(FORMS[name], encoding="utf-8")
    assert load_config(name) == (WANTED, True)
    assert load_config(Path(name), ["trainer.max_steps=4"])[0]["trainer"]["max_steps"] == 4


def test_a_dict_is_code_and_stays_as_it_was() -> None:
    """A dict counts as code; overrides change a copy."""
    given = {"model": {"name": "m"}}
    assert load_config(given, ["model.width=3"]) == ({"model": {"name": "m", "width": 3}}, False)
    assert given == {"model": {"name": "m"}}


def test_an_override_reaches_one_place_of_an_alias() -> None:
    """Aliases are written out, so that a change of one place leaves the other alone."""
    Path("a.yaml").write_text("model: &c {name: m, size: 1}\ndata: *c\n", encoding="utf-8")
    tree, _ = load_config("a.yaml", ["model.size=2"])
    assert (tree["model"]["size"], tree["data"]["size"]) == (2, 1)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("list.yaml", b"- 1\n", "expected a mapping with model"),
        ("empty.yaml", b"", "it is empty"),
        ("word.json", b'"x"', "expected a mapping"),
        ("bad.toml", b"a = = 1", "not valid TOML"),
        ("bad.json", b"{", "not valid JSON"),
        ("twice.json", b'{"a": 1, "a": 2}', "'a' is there twice"),
        ("deep.json", b'{"a":' + b"[" * 60 + b"]" * 60 + b"}", "too large"),
        ("deeper.json", b"[" * 200_000, "deeper"),
        ("wide.json", b'{"a": [' + b"1," * 100_000 + b"1]}", "too large"),
        ("bytes.yaml", b"a: \xff\xfe", "UTF-8"),
        ("huge.yaml", b"#" * (MAX_BYTES + 1), "larger than"),
        ("run.txt", b"a: 1", "format"),
    ],
)
def test_wrong_files_are_named(name: str, content: bytes, words: str) -> None:
    """A file that cannot be used is refused by name, with what is wrong with it."""
    Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert caught.value.path == name
    assert words in caught.value.problem


def test_a_missing_file_is_named() -> None:
    """No file, or a directory in its place, is a config error and not a traceback."""
    Path("dir.yaml").mkdir()
    for name in ("none.yaml", "dir.yaml"):
        with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
            load_config(name)
