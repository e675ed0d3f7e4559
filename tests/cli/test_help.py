"""`hookline help`: the pages of the documentation, printed in a terminal."""

import pytest
from commands import output_of

from hookline.cli import main
from hookline.cli.help import SITE, documentation, find_pages
from hookline.core.plugins import HOOKS


def test_every_page_is_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    """Each page has a topic of its own, and the list names all but the hooks' pages, which it counts."""
    pages = find_pages()
    hidden = {"decisions", "origins"}
    files = [path for path in documentation().rglob("*.md") if path.parent != documentation()]
    assert len(pages) == len([path for path in files if not hidden & {*path.parts}])
    listed = output_of(capsys, ["help"])
    assert [topic for topic, path in pages.items() if path.parts[-2] != "hooks" and topic not in listed] == []
    assert f"a page for each of {len(HOOKS.names())}" in listed


def test_a_topic_is_printed_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    """A page is printed as text, and ends with its address."""
    printed = output_of(capsys, ["help", "options"])
    assert "max_steps" in printed and "| ---" not in printed
    assert printed.rstrip().endswith(f"{SITE}reference/options.html")


def test_an_unknown_topic_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A topic that does not exist is refused with the nearest one."""
    assert main(["help", "optoins"]) == 2
    assert "there is no page 'optoins'; did you mean 'options'?" in capsys.readouterr().err


def test_a_word_lists_the_pages_that_have_it_in_their_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader who knows the subject and not the page's name learns it."""
    assert main(["help", "NaN"]) == 2
    assert "there is no page 'NaN'; pages about it: nan_forensics, find-a-nan" in capsys.readouterr().err
    assert main(["help", "early stopping"]) == 2
    assert "pages about it: early_stopping\n" in capsys.readouterr().err


def test_a_word_of_no_name_lists_the_pages_that_speak_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of the API are not the names of pages."""
    assert main(["help", "attach"]) == 2
    assert "there is no page 'attach'; pages about it: own-loop," in capsys.readouterr().err


def test_tabs_of_the_site_are_titles_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A block inside a tab is printed as code, below the tab's title."""
    printed = output_of(capsys, ["help", "quickstart"])
    assert "===" not in printed and "```" not in printed
    assert "Config" in printed and "- {name: monitor, every: 50}" in printed
