"""Links between the documents lead somewhere, to the heading where they name one."""
from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$",
                       re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_relative_link_leads_somewhere():
    seen = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)\s]+)\)",
                               text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text):
            if (re.match(r"[a-z]+:", link) or "/" not in link and "." not in link
                and not link.startswith("#")):
                continue  # another site; mathematics such as f[x](y)
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
            seen += 1
    assert seen > 50
