"""Let the links of README.md point to the repository in the packages: on a package index, relative ones lead nowhere.

hatchling calls it when it builds a package.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)\]\((?!https:)(?P<path>[^)]+)\)")


class ReadmeLinks(MetadataHookInterface):
    """Provides the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README.md, and put the address of the repository before each relative link."""
        source = metadata["urls"]["Source"]

        def absolute(link: re.Match[str]) -> str:
            return f"{link['image']}[{link['text']}]({source}/{'raw' if link['image'] else 'blob'}/main/{link['path']})"

        text = LINK.sub(absolute, Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
