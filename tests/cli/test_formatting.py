"""What commands print may come from anywhere, and must not control the terminal."""

from types import SimpleNamespace

import pytest
from commands import Captured, output_of

from hookline._console import printable
from hookline.cli.formatting import heading, labeled, open_console, paragraph, table
from hookline.core import plugins

ESCAPE = "\x1b[31m\x1b]0;title\x07\r\x08\x9b2J\u202e\u200b\ud800"


def test_ordinary_text_stays() -> None:
    """Letters of all scripts, emoji, line breaks and tabs are not changed."""
    text = "naïve 训练 🎣 → […]\n\tkept"
    assert printable(text) == text


def test_every_layout_is_safe(capsys: Captured) -> None:
    """Each function of the layout makes its text safe, so that no command can forget to."""
    console = open_console()
    heading(console, f"title{ESCAPE}\nforged", f"aside{ESCAPE}")
    paragraph(console, f"text{ESCAPE}")
    labeled(console, f"label{ESCAPE}", f"value{ESCAPE}")
    table(console, {f"column{ESCAPE}": {}}, [([f"cell{ESCAPE}"], "")])
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    for word in ("title", "aside", "text", "label", "value", "column", "cell"):
        assert f"{word}\\x1b[31m" in out


@pytest.mark.parametrize("columns", [80, 200, 300])
def test_lines_use_the_width_of_the_terminal(columns: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 200 columns, in paragraphs, beside labels and in tables."""
    monkeypatch.setenv("COLUMNS", str(columns))
    console, text = open_console(), "word " * 100
    for show in (paragraph, lambda console, text: labeled(console, "label", text)):
        show(console, text)
        widest = max(map(len, capsys.readouterr().out.splitlines()))
        assert min(columns, 200) - 5 <= widest <= min(columns, 200)
    table(console, {"one": {}, "two": {}}, [([text, text], "")])
    assert min(columns, 200) - 20 <= max(map(len, capsys.readouterr().out.splitlines())) <= min(columns, 200)


def test_an_entry_point_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Neither its name, what its import raises, nor what its class says about itself."""

    class Described:
        __doc__ = f"Watches{ESCAPE[:-1]} nothing."  # Python allows no half of a surrogate pair here

        def __init__(self, option: str = ESCAPE) -> None: ...

    def fail() -> None:
        raise ImportError(f"cannot{ESCAPE}")

    loads = {f"described{ESCAPE}": lambda: Described, f"failing{ESCAPE}": fail}
    package = SimpleNamespace(name=f"package{ESCAPE}", version=f"version{ESCAPE}")
    points = {
        name: [SimpleNamespace(name=name, value=f"x:{ESCAPE}", dist=package, load=load)] for name, load in loads.items()
    }
    monkeypatch.setitem(vars(plugins.HOOKS), "plugins", points)
    out = output_of(capsys, ["hooks"])
    assert out.replace("\n", "").isprintable()
    for word in ("described", "failing", "cannot", "Watches", "package", "version"):
        assert f"{word}\\x1b[31m" in out
