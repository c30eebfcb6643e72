"""The report's page: well formed, alone, escaped, its charts inside their frames with no text over
text. What a browser makes of it is tested in test_page_browser.py."""
from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnaccel.profile import svg
from gnnaccel.profile.entries import Entry, degrees
from gnnaccel.profile.judging import Error
from gnnaccel.profile.page import page
from gnnaccel.profile.pieces import (NARROW, WIDE, bars, duration, metric, number, percent, some,
                                     table)
from gnnaccel.profile.report import Report
from gnnaccel.profile.shadow import Shadow
from gnnaccel.profile.style import STYLE

VOID = {"meta", "rect", "line", "circle", "br"}
EVIL = "<script>alert('x')</script>\"'&"
REASON = dict(candidate="torch backend", code="GA301", text=f"estimated {EVIL}", hint="wait")


class Parsed(HTMLParser):
    """The elements, with their text, and whether every one was closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.stack, self.words = [], [], ""
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [""], tuple(t for t, _ in self.stack)))
        if tag not in VOID:
            self.stack.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [""], tuple(t for t, _ in self.stack)))

    def handle_endtag(self, tag):
        assert self.stack and self.stack[-1][0] == tag, (tag, self.stack)
        self.stack.pop()

    def handle_data(self, data):
        self.words += data
        for _, at in self.stack:
            self.elements[at][2][0] += data

    def all(self, tag: str) -> list[tuple[dict, str]]:
        return [(attrs, text[0]) for name, attrs, text, _ in self.elements if name == tag]


def entry(name: str, **fields) -> Entry:
    return Entry("GATConv", name,
                 **{**dict(route="cuda", kernel="fused attention, long rows split", device="cuda",
                           calls=10, timed=10, backwards=9, forward_ms=12.0, backward_ms=30.0,
                           kept_bytes=3 << 20, overhead_us=400.0, cache={"hit": 9, "miss": 1},
                           moved=4e8, flops=9e8,
                           graph=dict(num_src=1000, num_dst=1000, num_edges=123456)), **fields})


def passes(orderings: int) -> dict:
    return dict(pairs_src=5000, pairs_dst=7000, relations=90, compaction_src=0.5,
                compaction_dst=0.7, ordering="o0",
                orderings=[dict(name=f"o{i}", bytes=1e6 * i + 1, flops=1e7, estimated_us=3.0,
                                launches=2,
                                backward=dict(bytes=2e6, flops=1e7, launches=4) if i % 2 else None)
                           for i in range(orderings)])


def full(layers: int = 3) -> Report:
    """A report with everything in it."""
    report = Report()
    made = [entry(f"convs.{i}.{EVIL}", forward_ms=10.0 ** (i - 2),
                  histogram=[3, 10, 1000, 50000, 2_000_000, 12, 0, 0, 0, 0, 1], split=256,
                  flops=9e8 + i) for i in range(layers)]
    made += [entry("cpu", device="cpu", route="torch", kernel="torch backend", histogram=[5, 5],
                   split=256),
             entry("rel", passes=passes(4)),
             entry(EVIL, route="native", kernel=None, reasons=(REASON,), histogram=None, moved=None,
                   flops=None)]
    report._entries = {(i,): one for i, one in enumerate(made)}
    right, wrong = [Error("out", 1e-7, 2e-7, 6e-7)], [Error("grad x", 1.0, 2e-7, 6e-7)]
    report.comparison.layers = [Shadow("GATConv", f"convs.{i}.{EVIL}", "cuda", "k", "same", True,
                                       right, 200.0 * 10**i, 3.0, 5 << 30, 1 << 20)
                                for i in range(layers)]
    report.comparison.layers.append(Shadow("RGCNConv", None, "cuda", "k", "mismatch", True, wrong,
                                           notes=[EVIL]))
    return report


REPORTS = {"empty": Report(), "full": full(), "many": full(40), "one": full(1)}


@pytest.fixture(params=REPORTS)
def parsed(request):
    return Parsed(page(REPORTS[request.param]))


def test_it_is_one_well_formed_page(parsed):
    assert [tag for tag, *_ in parsed.elements[:3]] == ["html", "head",
                                                        "meta"] and len(parsed.all("title")) == 1
    assert parsed.all("h1")[0][1] == "gnnaccel report" and len(parsed.all("h2")) >= 1


def test_it_asks_nobody_for_anything(parsed):
    for tag, attrs, _, _ in parsed.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "a")
        assert not attrs.keys() & {"src", "href", "onload", "onclick"}
    policy = next(a["content"] for a, _ in parsed.all("meta")
                  if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "url(" not in parsed.all("style")[0][1] and "@import" not in parsed.all("style")[0][1]


def test_what_comes_from_outside_is_shown_as_it_is():
    text = page(full())
    assert "<script" not in text and EVIL not in text
    assert EVIL in Parsed(text).words


def test_every_section_is_there():
    titles = [title for _, title in Parsed(page(full())).all("h2")]
    assert titles == ["Where the time went", "Native against accelerated", "Decisions",
                      "Native calls", "Compared with the host", "Roofline, cuda", "Roofline, cpu",
                      "Degrees", "Relations"]
    words = Parsed(page(full())).words
    for part in ("GA301", "mismatch", "o3", "split beyond 256 edges", "no row has more than 256",
                 "9/10", "H200", "66.7x faster"):
        assert part in words, part


def test_the_summary_adds_up():
    words = Parsed(page(full())).words
    for part in ("217 ms", "83%", "50 of 60, 81% of the time", "3 of 4",
                 "layers held against the host"):
        assert part in words, part
    assert [title for _, title in Parsed(page(Report())).all("h2")] == ["Nothing was measured"]


def luminance(colour: str) -> float:
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(f * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
               for f, c in zip((0.2126, 0.7152, 0.0722), parts))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_accessibility_guidelines():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for theme in re.findall(r":root \{(.*?)\}", STYLE, re.S):
        colours = dict(re.findall(r"--(\w+): (#\w+)", theme))
        for paper in ("paper", "head"):
            for ink in ("ink", "soft", "good", "bad"):
                assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper, colours[ink])
        for area in ("ours", "host", "second"):  # WCAG asks 3 of shapes
            assert contrast(colours[area], colours["paper"]) >= 2.9, area


def test_light_and_dark_wide_and_narrow(parsed):
    style = parsed.all("style")[0][1]
    assert "prefers-color-scheme: dark" in style and "color-scheme: light dark" in style
    colours = set(re.findall(r"var\(--(\w+)\)", style))
    light, dark = re.findall(r":root \{(.*?)\}", style, re.S)
    assert all(f"--{c}:" in light and f"--{c}:" in dark for c in colours)
    assert any(a.get("name") == "viewport" for a, _ in parsed.all("meta"))
    for tag, _, _, around in parsed.elements:
        assert tag not in ("table",
                           "svg") or around[-1] == "div", "a table or chart that cannot scroll"
    titles = {label for attrs, _ in parsed.all("td") if (label := attrs.get("data-label"))}
    assert titles == {words for _, words in parsed.all("th")}  # a card's labels


def test_classes_are_styled(parsed):
    style = parsed.all("style")[0][1]
    used = {c for _, attrs, _, _ in parsed.elements for c in (attrs.get("class") or "").split()}
    assert all(f".{c}" in style for c in used), used


# ---- charts ----

def drawings(text: str):
    """(width, height, shapes' boxes, texts' boxes) of every chart; a text's box by the width of a
    monospaced character."""
    for chart in re.findall(r"<svg.*?</svg>", text, re.S):
        parsed = Parsed(chart)
        attrs = parsed.all("svg")[0][0]
        *origin, width, height = map(float, attrs["viewbox"].split())
        assert origin == [0, 0]
        yield width, height, list(shapes(parsed)), list(texts(parsed))


def shapes(parsed):
    for a, _ in parsed.all("rect"):
        x, y, w, h = (float(a[k]) for k in ("x", "y", "width", "height"))
        yield x, y, x + w, y + h
    for a, _ in parsed.all("line"):
        x1, y1, x2, y2 = (float(a[k]) for k in ("x1", "y1", "x2", "y2"))
        yield min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
    for a, _ in parsed.all("circle"):
        x, y, r = (float(a[k]) for k in ("cx", "cy", "r"))
        yield x - r, y - r, x + r, y + r


def texts(parsed):
    for a, words in parsed.all("text"):
        size = 11 if a.get("class") == "small" else 12
        x, y, width = float(a["x"]), float(a["y"]), 0.6 * size * len(words)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[a["text-anchor"]]
        yield left, y - 0.75 * size, left + width, y + 0.2 * size, words


@pytest.mark.parametrize("name", [name for name in REPORTS if name != "empty"])
def test_charts_stay_inside_their_frames(name):
    found = list(drawings(page(REPORTS[name])))
    assert len(found) >= 6
    for width, height, boxes, words in found:
        assert boxes and words
        for left, top, right, bottom, *text in [*boxes, *words]:
            assert left >= -0.01 and top >= -0.01, (text, left, top)
            assert right <= width + 0.01 and bottom <= height + 0.01, (text, right, bottom, width,
                                                                       height)


@pytest.mark.parametrize("name", [name for name in REPORTS if name != "empty"])
def test_no_text_lies_on_another(name):
    for _, _, _, words in drawings(page(REPORTS[name])):
        for i, (l1, t1, r1, b1, w1) in enumerate(words):
            for l2, t2, r2, b2, w2 in words[:i]:
                assert r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1, (w1, w2)


SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)
positive = st.floats(1e-9, 1e18)
widths = st.sampled_from((WIDE, NARROW))


def sound(chart: str) -> None:
    ((width, height, boxes, words),) = drawings(chart)
    for left, top, right, bottom, *_ in [*boxes, *words]:
        assert left >= -0.01 and top >= -0.01 and right <= width + 0.01 and bottom <= height + 0.01
    for i, (l1, t1, r1, b1, w1) in enumerate(words):
        assert all(r1 <= l2 or r2 <= l1 or b1 <= t2 or b2 <= t1
                   for l2, t2, r2, b2, _ in words[:i]), w1


@SETTINGS
@given(st.lists(st.tuples(positive, positive), max_size=24), positive, positive,
       st.floats(1e3, 1e18), widths)
def test_any_roofline_is_sound(points, slow, ratio, flops, width):
    rates = (("memory", slow), ("cache", slow * min(max(ratio, 1.0), 1e6)))
    sound(svg.roofline("t", rates, flops, [(str(i), x, y) for i, (x, y) in enumerate(points, 1)],
                       width))


@SETTINGS
@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40), st.integers(0, 40), widths)
def test_any_columns_are_sound(counts, place, width):
    sound(svg.columns("t", counts, width, (min(place, len(counts)), "split beyond 256 edges")))


@SETTINGS
@given(st.lists(st.integers(0, 30), max_size=200), st.integers(31, 40))
def test_degrees_are_bit_lengths(dst, nodes):
    import torch
    found = [0] * 9
    for node in range(nodes):
        found[dst.count(node).bit_length()] += 1
    while len(found) > 1 and not found[-1]:
        found.pop()
    assert degrees(torch.tensor(dst, dtype=torch.long), nodes) == found


def test_the_checks_see_text_on_text_and_outside():
    chart = svg.figure("t", 50, 20,
                       [svg.text(0, 12, "one"), svg.text(3, 12, "two"),
                        svg.text(40, 12, "outside")])
    ((width, _, _, words),) = drawings(chart)
    assert words[0][2] > words[1][0] and words[2][2] > width


def test_bars_are_as_long_as_their_values():
    drawn = Parsed(bars([("a", None, [("host", 4.0, "4"), ("ours", 1.0, "1")]),
                         (EVIL, EVIL, [("other", 0.0, EVIL)])]))
    lengths = [float(re.search(r"\* ([\d.]+)\)", attrs["style"])[1])
               for attrs, _ in drawn.all("span") if "style" in attrs]
    assert lengths == [1.0, 0.25, 0.0] and EVIL in drawn.words
    assert Parsed(bars([])).words == ""


def test_columns_of_a_table_that_hold_nothing_are_left_out():
    made = Parsed(table(("a", "b", "c"), [(1, None, None), (2, None, 3)], numbers=("c",)))
    assert [words for _, words in made.all("th")] == ["a", "c"]
    cells = [(words, attrs.get("class", "")) for attrs, words in made.all("td")]
    assert cells == [("1", ""), ("–", "n none"), ("2", ""), ("3", "n")]


def test_numbers_for_people():
    found = [number(v) for v in (None, 0.01234, 12.34, 999.4, 999.6, 1234567.0)]
    assert found == [None, "0.0123", "12.3", "999", "1,000", "1,234,567"]
    assert [duration(v)
            for v in (0.0, 0.0123, 12.34, 999.9,
                      61_000.0)] == ["0 ms", "12.3 µs", "12.3 ms", "1 s", "61 s"]
    assert [metric(v) for v in (5.0, 1500.0, 3.96e12, 6e13)] == ["5 ", "1.5 k", "3.96 T", "60 T"]
    assert [percent(v) for v in (0.0, 0.001, 0.006, 0.5, 1.0)] == ["0%", "<1%", "1%", "50%", "100%"]
    assert some("aabc", 2) == "a, b and 1 more" and some("ab") == "a, b"


def test_the_roof_is_where_its_numbers_say():
    plane = svg.LogPlane([0.01, 100.0], [1e6, 1e10], WIDE)
    assert plane.place(0.01, 1e6) == (plane.LEFT, plane.HEIGHT - plane.BOTTOM)
    assert plane.place(100.0, 1e10) == (plane.width - 18, plane.TOP)
    middle = (plane.LEFT + plane.width - 18) / 2, (plane.TOP + plane.HEIGHT - plane.BOTTOM) / 2
    assert plane.place(1.0, 1e8) == pytest.approx(middle)


def test_points_that_cannot_be_told_apart_share_a_label():
    points = [(str(i), 1.0 + 0.001 * i, 1e9) for i in range(1, 6)] + [("6", 1.0, 1e7)]
    ((_, _, boxes, words),) = drawings(svg.roofline("t", (("memory", 1e9),), 1e10, points, WIDE))
    assert {"1, 2, 3…",
            "6"} <= {w for *_, w in words} and not {"2", "4", "5"} & {w for *_, w in words}


def test_relations_of_layers_that_are_alike_are_shown_once():
    report = Report()
    report._entries = {(i,): entry(f"layer {i}", passes=passes(2), forward_ms=9.0 - i)
                       for i in range(4)}
    report._entries[4,] = entry("other", passes=passes(3))
    words = [text for _, text in Parsed(page(report)).all("td")]
    assert words.count("layer 0, layer 1 and 2 more") == 2 and words.count("o1") == 2
    assert words[words.index("o1") + 1] == number((1e6 + 1 + 2e6) / 1e6)  # forward and backward


def test_degrees_are_counted_by_bits():
    import torch
    dst = torch.tensor([0] * 1 + [1] * 2 + [2] * 3 + [3] * 4 + [4] * 7 + [5] * 8)
    assert degrees(dst, 7) == [1, 1, 2, 2, 1]
    assert degrees(dst[:0], 3) == [3]
