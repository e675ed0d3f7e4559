"""A hook of MkDocs: links of the pages to other files of the repository lead to the repository on the site."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<=\]\()(\.\.?/[^)\s]+)(?=\))")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace relative links that leave docs/ by links to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def absolute(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        return link[1] if target.startswith("docs/") else f"{config.repo_url}/blob/main/{target}"

    return _LINK.sub(absolute, markdown)
