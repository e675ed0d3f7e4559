"""`hookline help`: read the documentation in the terminal, without a network."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from rich.markdown import Markdown

from hookline._words import folded, nearest
from hookline.cli.arguments import argument
from hookline.cli.formatting import heading, labeled, open_console
from hookline.errors import HooklineError

SITE = "https://hookline.readthedocs.io/"
"""Where the documentation is online. It is also in `[project.urls]` of pyproject.toml."""
FOLDERS = {
    "start": "get started",
    "tutorials": "tutorials",
    "how-to": "how to",
    "coming-from": "coming from",
    "reference": "reference",
    "explanation": "explanation",
    "help": "help",
    "project": "project",
}
_MOST = 4  # topics that a message lists when no topic's name contains the word
_ONLINE_ONLY = ("decisions", "origins")  # folders of documents about the project's history

ARGUMENTS = argument("topic", "TOPIC", "a page to print, such as options; without one, all topics", nargs="?")


def run(options: argparse.Namespace) -> int:
    """Print a page, or the list of pages."""
    console = open_console()
    pages = find_pages()
    if options.topic is None:
        for folder, title in FOLDERS.items():
            topics = [topic for topic, path in pages.items() if path.parts[-2] == folder]
            if topics:
                labeled(console, title, ", ".join(topics), indent=0, width=14)
        hooks = sum(path.parts[-2] == "hooks" and path.stem != "index" for path in pages.values())
        labeled(console, "hooks", f"a page for each of {hooks}, such as checkpoint", indent=0, width=14)
        console.print(f"\nhookline help TOPIC prints a page. They are online, with pictures and search:\n{SITE}")
        return 0
    if options.topic not in pages:
        about = ", ".join(pages_about(options.topic, pages))
        remedy = f"pages about it: {about}" if about else nearest(options.topic, pages, "`hookline help`")
        raise HooklineError(f"there is no page {options.topic!r}; {remedy}")
    page = pages[options.topic]
    console.print(Markdown(without_tabs(page.read_text(encoding="utf-8")), hyperlinks=False))
    folder = page.relative_to(documentation()).parent.as_posix()
    heading(console, "online", f"{SITE}{folder}/{page.stem}.html")
    return 0


def pages_about(words: str, pages: Mapping[str, Path]) -> list[str]:
    """Return the topics with these words in their names; if none, those whose pages mention them most."""
    if named := [topic for topic in pages if folded(words) in folded(topic)]:
        return named
    texts = {topic: path.read_text(encoding="utf-8").lower() for topic, path in pages.items()}
    shares = {topic: text.count(words.lower()) / len(text) for topic, text in texts.items()}
    return sorted((topic for topic in shares if shares[topic]), key=shares.__getitem__, reverse=True)[:_MOST]


def documentation() -> Path:
    """Return the folder of the pages: the package's own if it is installed, docs/ in a clone."""
    package = Path(__file__).parents[1]
    installed = package / "_docs"
    return installed if installed.is_dir() else package.parents[1] / "docs"


def without_tabs(text: str) -> str:
    """Return a page with its tabs, which only the site has, turned into titled paragraphs."""
    lines, is_in_tab = [], False
    for line in text.splitlines():
        if tab := re.match(r'=== "(.*)"$', line):
            lines.append(f"*{tab[1]}*")
            is_in_tab = True
        else:
            is_in_tab = is_in_tab and (not line or line.startswith("    "))
            lines.append(line[4:] if is_in_tab else line)
    return "\n".join(lines)


def find_pages() -> dict[str, Path]:
    """Return every page by its topic: the name of its file, or of its folder if it is the folder's index."""
    paths = sorted(documentation().rglob("*.md"))
    known = [path for path in paths if path.parent != documentation() and not {*_ONLINE_ONLY} & {*path.parts}]
    return {path.parent.name if path.stem == "index" else path.stem: path for path in known}
