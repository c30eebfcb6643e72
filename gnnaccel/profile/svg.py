"""Charts as inline SVG, written by hand. Colours are the page's CSS variables, so they follow its theme; all text is escaped."""
from __future__ import annotations

import html
import math
from collections.abc import Sequence

CHARACTER = 6.6  # width of one at the charts' font size, generously
_ROW = 26
_LABEL = 34  # characters of a label that are shown


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{f" class={chr(34)}{css}{chr(34)}" if css else ""}>'
            f'{html.escape(words)}</text>')


def short(words: str, limit: int = _LABEL) -> str:
    return words if len(words) <= limit else words[:limit - 1] + "…"


def figure(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """A chart that scales with the page, down to a size at which its text can be read."""
    return (f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{html.escape(title, quote=True)}" '
            f'style="max-width:{width:.0f}px;min-width:{min(width, 480.0):.0f}px">{"".join(parts)}</svg>')


def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> str:
    """Horizontal bars: ``rows`` of (label, bars), each bar (css class, value, words behind it)."""
    left, room, words = _LABEL * CHARACTER + 10, 300.0, 22 * CHARACTER + 8
    most = max((value for _, group in rows for _, value, _ in group), default=0.0) or 1.0
    parts, y = [], 4.0
    for label, group in rows:
        parts.append(text(left - 8, y + 14 + (len(group) - 1) * _ROW / 2 * 0.8, short(label), "end"))
        for css, value, behind in group:
            length = max(1.0, room * value / most)
            parts.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="{length:.1f}" height="16" rx="2" class="{css}"/>')
            parts.append(text(left + length + 6, y + 13, short(behind, 22)))
            y += _ROW * 0.8
        y += _ROW * 0.4
    return figure(title, left + room + words, y + 4, parts)


def columns(title: str, counts: Sequence[int], labels: Sequence[str], mark: tuple[float, str] | None = None) -> str:
    """Upright bars, their heights by the logarithm of ``counts``. ``mark``: (place among them, words) of a line across."""
    step, height, top, left = 46.0, 150.0, 40.0, 12.0
    most = math.log10(max([*counts, 1]) + 1)
    parts = []
    for at, (count, label) in enumerate(zip(counts, labels)):
        x, h = left + at * step, height * math.log10(count + 1) / most
        parts.append(f'<rect x="{x + 4:.1f}" y="{top + height - h:.1f}" width="{step - 8:.1f}" height="{h:.1f}" class="ours"/>')
        if count:
            parts.append(text(x + step / 2, top + height - h - 4, _count(count), "middle", "small"))
        parts.append(text(x + step / 2, top + height + 16, label, "middle", "small"))
    width = max(left * 2 + len(counts) * step, 380.0)
    if mark is not None:
        place, words = mark
        x = left + place * step
        parts.append(f'<line x1="{x:.1f}" y1="18" x2="{x:.1f}" y2="{top + height:.1f}" class="mark"/>')
        anchor = "end" if x > width / 2 else "start"
        parts.append(text(x + (-5 if anchor == "end" else 5), 14, words, anchor, "small"))
    return figure(title, width, top + height + 26, parts)


def _count(count: int) -> str:
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)


class LogPlane:
    """A plane with logarithmic axes over (low, high) ranges of both coordinates; decades are lined."""

    WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 620.0, 330.0, 70.0, 24.0, 44.0

    def __init__(self, xs: Sequence[float], ys: Sequence[float]):
        self.x0, self.x1 = _decades(xs)
        self.y0, self.y1 = _decades(ys)

    def place(self, x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - self.x0) / (self.x1 - self.x0)
        up = (math.log10(y) - self.y0) / (self.y1 - self.y0)
        inner = self.HEIGHT - self.TOP - self.BOTTOM
        return self.LEFT + right * (self.WIDTH - self.LEFT - 12), self.TOP + (1 - up) * inner

    def axes(self, across: str, upwards: str) -> list[str]:
        parts = []
        for decade in range(self.x0, self.x1 + 1, 1 + (self.x1 - self.x0) // 10):
            x, bottom = self.place(10.0**decade, 10.0**self.y0)
            parts.append(f'<line x1="{x:.1f}" y1="{self.TOP:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" class="grid"/>')
            parts.append(text(x, bottom + 16, _power(decade), "middle", "small"))
        for decade in range(self.y0, self.y1 + 1, 1 + (self.y1 - self.y0) // 10):
            x, y = self.place(10.0**self.x0, 10.0**decade)
            parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{self.WIDTH - 12:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(text(x - 6, y + 4, _power(decade), "end", "small"))
        parts.append(text(self.WIDTH - 12, self.HEIGHT - 8, across, "end", "small"))
        parts.append(text(4, 14, upwards, "start", "small"))
        return parts


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _power(decade: int) -> str:
    return f"{10.0**decade:g}" if -3 <= decade <= 3 else f"1e{decade}"


def roofline(title: str, bandwidths: Sequence[tuple[str, float]], flops: float,
             points: Sequence[tuple[str, float, float]]) -> str:
    """Operations per second over operations per byte. ``points`` of (number shown, x, y); lines are ``bandwidths`` (name, bytes
    per second) up to ``flops``."""
    ridges = [flops / rate for _, rate in bandwidths]
    plane = LogPlane([*(x for _, x, _ in points), max(ridges) * 4, min(ridges) / 4, 0.02],
                     [*(y for _, _, y in points), flops, flops / 1e4])
    parts = plane.axes("operations per byte", "operations per second")
    for at, (_, rate) in enumerate(bandwidths):
        low = max(10.0**plane.x0, 10.0**plane.y0 / rate)
        (x1, y1), (x2, y2) = plane.place(low, low * rate), plane.place(flops / rate, flops)
        parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="roof{at}"/>')
    (x1, y1), (x2, y2) = plane.place(min(ridges), flops), plane.place(10.0**plane.x1, flops)
    parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="roof0"/>')
    taken: list[tuple[float, float]] = []
    for number, x, y in points:
        px, py = plane.place(x, y)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" class="ours"/>')
        found = _free(px, py + 4, taken)
        if found is not None:  # in a crowd, the table says the rest
            parts.append(text(*found, number, "start", "small"))
    return figure(title, plane.WIDTH, plane.HEIGHT, parts)


def _free(x: float, y: float, taken: list[tuple[float, float]]) -> tuple[float, float] | None:
    """A place for a number next to (x, y) on which no other one lies."""
    wide = 3 * CHARACTER
    for right in (8.0, -8.0 - wide, 8.0 + 1.5 * wide, -8.0 - 2.5 * wide):
        for down in (0, 13, -13, 26, -26, 39, -39):
            at = min(max(x + right, 0.0), LogPlane.WIDTH - wide), min(max(y + down, 28.0), LogPlane.HEIGHT - LogPlane.BOTTOM)
            if all(abs(at[0] - tx) > wide or abs(at[1] - ty) > 12 for tx, ty in taken):
                taken.append(at)
                return at
    return None
