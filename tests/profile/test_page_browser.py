"""The report's page in a real browser: nothing fails or is asked for, nothing is cut or overlaps,
charts are drawn."""
from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gnnaccel.profile.page import page
from tests import browser
from tests.profile.test_page import REPORTS

FIGURES = sorted((Path(__file__).parents[2] / "docs" / "images").glob("*.svg"))

pytestmark = pytest.mark.skipif(browser.find() is None,
                                reason="no browser of the Chromium family on the PATH")

# What a reader would see; boxes in CSS pixels, only of elements that are shown.
LOOK = """(() => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const shown = (what, root = document) => [...root.querySelectorAll(what)].filter(e => e.getClientRects().length);
  return {
    page: [document.documentElement.scrollWidth, document.documentElement.clientWidth],
    paper: getComputedStyle(document.body).backgroundColor,
    titles: shown('h2').map(e => e.textContent),
    scrolling: shown('.scroll, .chart').filter(e => e.scrollWidth > e.clientWidth + 1).length,
    fills: shown('.fill').map(e => { const b = box(e); return [b[2] - b[0], getComputedStyle(e).backgroundColor]; }),
    cut: shown('.bar, .row, td, th, .tile').filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent),
    charts: shown('svg').map(s => ({frame: box(s), shapes: shown('rect, circle, line', s).length,
                                    words: shown('text', s).map(t => [...box(t), t.textContent])})),
  };
})()"""


@pytest.fixture(scope="module")
def tab():
    try:
        found = browser.Browser(browser.find()).__enter__()
    except RuntimeError as problem:
        pytest.skip(f"{browser.find()} does not start here: {problem}")
    with contextlib.closing(found):
        yield found


def look(tab, folder, name: str, width: int, dark: bool = False) -> dict:
    path = folder / f"{name}.html"
    path.write_text(page(REPORTS[name]), encoding="utf-8")
    tab.show(path, width, dark)
    return tab.value(LOOK)


def overlapping(words: list) -> list:
    """Pairs of texts that lie on one another by more than their boxes' margins."""
    return [(one[4], other[4]) for i, one in enumerate(words) for other in words[:i]
            if min(one[2], other[2]) - max(one[0], other[0]) > 1
            and min(one[3], other[3]) - max(one[1], other[1]) > 4]


@pytest.mark.parametrize("width", (400, 1400))
def test_everything_is_shown_whole(tab, tmp_path, width):
    found = look(tab, tmp_path, "full", width)
    assert found["page"][0] <= found["page"][1], "the page scrolls sideways"
    assert found["cut"] == [] and found["scrolling"] == 0
    assert len(found["titles"]) == 9
    assert len(found["charts"]) == 4  # two rooflines, two histograms
    for chart in found["charts"]:
        left, top, right, bottom = chart["frame"]
        assert right - left > 300 and chart["shapes"] >= 3 and chart["words"]
        for l, t, r, b, words in chart["words"]:
            assert l >= left - 1 and t >= top - 1 and r <= right + 1 and b <= bottom + 1, words
        assert overlapping(chart["words"]) == []
    lengths = [length for length, _ in found["fills"]]
    assert max(lengths) > 100 and min(lengths) >= 2 and len(
        {colour for _, colour in found["fills"]}) == 3


def test_nothing_fails_and_nothing_is_asked_for(tab, tmp_path):
    for name in ("empty", "many"):
        found = look(tab, tmp_path, name, 1400)
        assert found["titles"] and found["cut"] == []
        asked = [e["params"]["request"]["url"] for e in tab.events
                 if e["method"] == "Network.requestWillBeSent"]
        assert asked == [(tmp_path / f"{name}.html").as_uri()]
        loud = [e for e in tab.events
                if e["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled",
                                   "Log.entryAdded")]
        assert loud == []


def test_the_theme_is_the_readers(tab, tmp_path):
    assert look(tab, tmp_path, "one", 1400)["paper"] == "rgb(255, 255, 255)"
    assert look(tab, tmp_path, "one", 1400, dark=True)["paper"] == "rgb(20, 23, 27)"


def test_the_documentations_figures(tab, tmp_path):
    drawn = [file.read_text(encoding="utf-8") for file in FIGURES]
    assert len(drawn) == 5
    page = tmp_path / "figures.html"
    page.write_text("".join(drawn), encoding="utf-8")
    tab.show(page, 900)
    for chart in tab.value(LOOK)["charts"]:
        left, top, right, bottom = chart["frame"]
        for l, t, r, b, words in chart["words"]:
            assert l >= left and t >= top and r <= right and b <= bottom + 1, words
        assert overlapping(chart["words"]) == []


def test_what_is_wrong_is_seen(tab, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text('<div class="bar" '
                    'style="width:50px;overflow:hidden;white-space:nowrap">much longer '
                    'than that</div>'
                    '<img src="http://localhost:9/x.png"><svg width="90" height="20"><text '
                    'y="12">one</text><text x="3" y="12">two</text></svg>'
                    '<script>console.log("loud")</script>', encoding="utf-8")
    tab.show(path, 400)
    found = tab.value(LOOK)
    assert found["cut"] == ["much longer than that"] and overlapping(found["charts"][0]["words"])
    methods = [event["method"] for event in tab.events]
    assert methods.count("Network.requestWillBeSent") == 2 and "Runtime.consoleAPICalled" in methods
