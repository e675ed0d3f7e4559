"""A hook of MkDocs: pages that the site has besides those of mkdocs.yml, and links that leave docs/."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OF_THE_REPOSITORY = {"project/changelog.md": "CHANGELOG.md", "project/contributing.md": "CONTRIBUTING.md"}

_LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[)#])")


def on_config(config: Any) -> None:
    """List the page of each built-in hook in the navigation."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    hooks = next(section["Built-in hooks"] for section in reference if "Built-in hooks" in section)
    paths = sorted(Path(config.docs_dir, "reference", "hooks").glob("*.md"))
    hooks.extend(f"reference/hooks/{path.name}" for path in paths if path.stem != "index")


def on_files(files: Any, config: Any) -> None:
    """Add the pages that are in the root of the repository, where people look for them, too."""
    for page, name in OF_THE_REPOSITORY.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace relative links that leave docs/ by links to the repository."""
    here = posixpath.dirname(page.file.src_uri)
    folder = posixpath.dirname(OF_THE_REPOSITORY.get(page.file.src_uri, posixpath.join("docs", page.file.src_uri)))

    def of_the_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if not target.startswith("docs/"):
            return f"{config.repo_url}/blob/main/{target}"
        if (ROOT / target).is_dir():
            target = f"{target}/index.md"
        return posixpath.relpath(target, posixpath.join("docs", here))

    return _LINK.sub(of_the_site, markdown)
