"""A hook of mkdocs: the site also has the pages and scripts outside of docs/ that pages link to.

Links in the documents are those of the repository, so that they work there. On the site a file
that is not in docs/ lies under its path from the root of the repository, and links are rewritten
to that.
"""
from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/**/*.md", "examples/**/*.py")
# a link or an image of Markdown; not in code, which `on_page_markdown` leaves out
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.S | re.M)


def on_files(files: Any, config: Any) -> Any:
    """Add what is outside of docs/."""
    from mkdocs.structure.files import File

    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(),
                                        abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``markdown`` with links between pages as the site has them."""
    uri = page.file.src_uri
    return rewritten(markdown, uri, Path(page.file.abs_src_path))


def rewritten(markdown: str, uri: str, path: Path) -> str:
    """``markdown``, of the file ``path`` that the site has at ``uri``."""
    def moved(link: re.Match) -> str:
        target = link[2]
        if re.match(r"[a-z]+:", target):
            return link[0]
        found = Path(os.path.normpath(path.parent / target))
        if found.is_dir():
            found = next(filter(Path.exists, (found / "README.md", path)))
        if not found.exists():
            return link[0]  # which mkdocs tells of
        new = posixpath.relpath(uri_of(found), posixpath.dirname(uri) or ".")
        return f"{link[1]}{new}{link[3]}"

    parts = _CODE.split(markdown)
    return "".join(part if at % 2 else _LINK.sub(moved, part) for at, part in enumerate(parts))


def uri_of(path: Path) -> str:
    """Where the site has a file of the repository."""
    base = DOCS if path.is_relative_to(DOCS) else ROOT
    return path.relative_to(base).as_posix()
