"""The documentation site (mkdocs.yml, .ci/site.py), as far as it can be seen without mkdocs; `make
docs` builds it, and fails at a warning."""
from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "examples" / "README.md",
         *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / ".ci" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_one_place_in_the_navigation(site):
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"(\S+\.md)$", nav, re.M)
    assert sorted(listed) == sorted(site.uri_of(page) for page in PAGES)


def test_links_that_leave_docs_lead_to_where_the_site_has_the_file(site):
    def made(text: str, uri: str = "guide.md", path: Path = DOCS / "guide.md") -> str:
        return site.rewritten(text, uri, path)

    assert made("[a](../examples/README.md)") == "[a](examples/README.md)"
    assert made("[a](../examples/ddp.py)") == "[a](examples/ddp.py)"
    assert made("[a](results/), ![b](images/lanes.svg)") == (
        "[a](results/README.md), ![b](images/lanes.svg)")
    assert made("[a](kernels.md#hubs) [b](#hubs)") == "[a](kernels.md#hubs) [b](#hubs)"
    for same in ("`[a](../examples/ddp.py)`", "```\n[a](../examples/ddp.py)\n```", "[a](no/such.md)",
                 "[a](mailto:../examples)"):
        assert made(same) == same
    examples = ROOT / "examples" / "README.md"
    assert made("[a](../docs/guide.md) [b](ddp.py)", "examples/README.md", examples) == (
        "[a](../guide.md) [b](ddp.py)")
    assert made("[a](../kernels.md)", "notes/README.md", DOCS / "notes" / "README.md") == (
        "[a](../kernels.md)")


def test_every_file_that_a_page_links_to_is_on_the_site(site):
    there = {path for pattern in site.OUTSIDE for path in ROOT.glob(pattern)}
    for page in PAGES:
        for link in site._LINK.findall(site._CODE.sub("", page.read_text(encoding="utf-8"))):
            found = (page.parent / link[1]).resolve()
            if found.is_file() and not found.is_relative_to(DOCS):
                assert found in there, f"{page.name}: {link[1]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lists_and_code_in_them_read_alike_on_the_site_and_in_the_repository(page):
    """The site's Markdown wants an empty line before a list, and four spaces before code in one."""
    before = ""
    for line in re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M
                       ).splitlines():
        item = r"\s*([-*]|\d+\.) "
        if re.match(item, line) and before.strip():
            assert re.match(item, before) or before.startswith(" "), f"no empty line before: {line}"
        assert not re.match(r" {1,3}(```|\|)", line), f"four spaces: {line}"
        before = line


def test_versions_of_what_builds_it_are_pinned():
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    extra = re.search(r"^docs =\n((?:    .*\n)+)", text, re.M)[1].split()
    assert len(extra) > 2 and all(re.fullmatch(r"[\w-]+==[\d.]+", name) for name in extra)
