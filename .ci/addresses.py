"""Writes a repository's address into what is about to be built: the metadata's URLs, and the links
of the README, which an index shows far from the files that they name.

    python .ci/addresses.py https://host/owner/repository v0.2.0

Changes setup.cfg and README.md in the current folder; `release.yml` does it in its own checkout.
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\])\((?![a-z]+:|#)([^)\s]+)\)")
_IMAGES = (".png", ".svg")


def absolute(text: str, address: str, ref: str) -> str:
    """``text`` of Markdown with links to files of the repository at ``ref``."""
    def link(found: re.Match) -> str:
        image, label, path = found.groups()
        kind = "raw" if image or path.partition("#")[0].endswith(_IMAGES) else "blob"
        return f"{image}{label}({address}/{kind}/{ref}/{path})"

    return _LINK.sub(link, text)


def with_urls(text: str, address: str, ref: str) -> str:
    """setup.cfg with the project's URLs."""
    urls = {"Source": address, "Documentation": f"{address}/tree/{ref}/docs",
            "Changelog": f"{address}/blob/{ref}/CHANGELOG.md", "Issues": f"{address}/issues"}
    lines = "".join(f"    {name} = {url}\n" for name, url in urls.items())
    head, mark, rest = text.partition("[metadata]\n")
    if not mark or "project_urls" in text:
        raise SystemExit("setup.cfg has no [metadata], or URLs already")
    return f"{head}{mark}url = {address}\nproject_urls =\n{lines}{rest}"


def main() -> None:
    if len(sys.argv) != 3 or not re.match(r"https://[^/]+/.+[^/]$", sys.argv[1]):
        raise SystemExit(__doc__)
    for name, change in (("setup.cfg", with_urls), ("README.md", absolute)):
        path = Path(name)
        path.write_text(change(path.read_text(encoding="utf-8"), *sys.argv[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
