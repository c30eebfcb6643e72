"""Charts as inline SVG, written by hand. Colours are the page's CSS variables, so they follow its
theme; all text is escaped. Drawings are made for the width at which they are shown."""
from __future__ import annotations

import html
import math
from collections.abc import Sequence

CHARACTER = 6.6  # width of one at the charts' font size, generously


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" '
            f'text-anchor="{anchor}"{f" class={chr(34)}{css}{chr(34)}" if css else ""}>'
            f'{html.escape(words)}</text>')


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def figure(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" role="img" '
            f'aria-label="{html.escape(title, quote=True)}">{"".join(parts)}</svg>')


def columns(title: str, counts: Sequence[int], width: float,
            mark: tuple[float, str] | None = None) -> str:
    """Upright bars of degrees by their number of bits, their heights by the logarithm of
    ``counts``. ``mark``: (place among them, words) of a line across."""
    height, top, left = 150.0, 40.0, 14.0
    step = min(52.0, (width - 2 * left) / len(counts))
    most = math.log10(max([*counts, 1]) + 1)
    parts, taken = [], 0.0
    for at, count in enumerate(counts):
        x, h = left + at * step, height * math.log10(count + 1) / most
        parts.append(f'<rect x="{x + 1.5:.1f}" y="{top + height - h:.1f}" '
                     f'width="{step - 3:.1f}" height="{h:.1f}" rx="2" '
                     'class="ours"/>')
        words, middle = _count(count), x + step / 2
        half = len(words) * CHARACTER / 2
        if count and middle - half >= max(taken, 0.0) and middle + half <= width:
            parts.append(text(middle, top + height - h - 5, words, "middle", "small"))
            taken = middle + half
    parts += _bounds(len(counts), left, step, top + height, width)
    if mark is not None:
        place, words = mark
        x = left + place * step
        parts.append(line(x, 18, x, top + height, "mark"))
        parts.append(text(min(max(x, half := len(words) * CHARACTER / 2), width - half), 13, words,
                          "middle", "small"))
    return figure(title, width, top + height + 40, parts)


def _bounds(count: int, left: float, step: float, base: float, width: float) -> list[str]:
    """The axis under columns: where each begins, as far as there is room."""
    end = left + count * step
    parts, taken = [line(left, base, end, base, "axis")], 0.0
    for at in range(count + 1):
        x, words = left + at * step, _bound(at)
        half = len(words) * CHARACTER / 2
        if x - half >= taken and x + half <= width:
            parts.append(text(x, base + 15, words, "middle", "small"))
            taken = x + half + 2
    return [*parts, text(left, base + 32, "edges entering a node", "start", "small")]


def _count(count: int) -> str:
    """Two digits: enough to go with a logarithmic height."""
    for unit, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return (f"{count / unit:.2g}{letter}"
                    if count < 9.5 * unit else f"{count / unit:.0f}{letter}")
    return str(count)


def _bound(bits: int) -> str:
    """The least number of so many bits."""
    power = max(0, bits - 1)
    return "0" if not bits else f"{1 << power % 10}{('', 'k', 'M', 'G', 'T', 'P')[power // 10]}"


class LogPlane:
    """A plane with logarithmic axes over (low, high) ranges of both coordinates; decades are
    lined."""

    HEIGHT, LEFT, TOP, BOTTOM = 330.0, 46.0, 26.0, 44.0

    def __init__(self, xs: Sequence[float], ys: Sequence[float], width: float):
        self.width = width
        self.x0, self.x1 = _decades(xs)
        self.y0, self.y1 = _decades(ys)

    def place(self, x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - self.x0) / (self.x1 - self.x0)
        up = (math.log10(y) - self.y0) / (self.y1 - self.y0)
        inner = self.HEIGHT - self.TOP - self.BOTTOM
        return self.LEFT + right * (self.width - self.LEFT - 18), self.TOP + (1 - up) * inner

    def axes(self, across: str, upwards: str) -> list[str]:
        parts = []
        for decade in range(self.x0, self.x1 + 1,
                            1 + (self.x1 - self.x0) // int((self.width - self.LEFT) / 44)):
            x, bottom = self.place(10.0**decade, 10.0**self.y0)
            parts.append(line(x, self.TOP, x, bottom, "grid"))
            parts.append(text(x, bottom + 16, _power(decade), "middle", "small"))
        for decade in range(self.y0, self.y1 + 1, 1 + (self.y1 - self.y0) // 10):
            x, y = self.place(10.0**self.x0, 10.0**decade)
            parts.append(line(x, y, self.width - 18, y, "grid"))
            parts.append(text(x - 6, y + 4, _power(decade), "end", "small"))
        parts.append(text(self.width - 18, self.HEIGHT - 8, across, "end", "small"))
        parts.append(text(4, 13, upwards, "start", "small"))
        return parts


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _power(decade: int) -> str:
    if 3 <= decade < 18:
        return f"{10 ** (decade % 3)} {'kMGTP'[decade // 3 - 1]}"
    return f"{10.0**decade:g}" if -3 <= decade < 3 else f"1e{decade}"


def roofline(title: str, bandwidths: Sequence[tuple[str, float]], flops: float,
             points: Sequence[tuple[str, float, float]], width: float) -> str:
    """Operations per second over operations per byte. ``points`` of (number shown, x, y); lines are
    ``bandwidths`` (name, bytes per second) up to ``flops``."""
    ridges = [flops / rate for _, rate in bandwidths]
    plane = LogPlane([*(x for _, x, _ in points), max(ridges) * 4, min(ridges) / 4, 0.02],
                     [*(y for _, _, y in points), flops, flops / 1e3], width)
    parts = plane.axes("operations per byte", "operations per second")
    for at, (_, rate) in enumerate(bandwidths):
        low = max(10.0**plane.x0, 10.0**plane.y0 / rate)
        parts.append(line(*plane.place(low, low * rate), *plane.place(flops / rate, flops),
                          f"roof{at}"))
    parts.append(line(*plane.place(min(ridges), flops), *plane.place(10.0**plane.x1, flops),
                      "roof0"))
    groups: list[tuple[float, float, list[str]]] = []  # of points that cannot be told apart
    for number, x, y in points:
        px, py = plane.place(x, y)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5.5" class="ours dot"/>')
        near = next((numbers for gx, gy, numbers in groups if abs(gx - px) < 9
                     and abs(gy - py) < 9), None)
        if near is None:
            groups.append((px, py, [number]))
        else:
            near.append(number)
    taken: list[tuple[float, float, float]] = []
    for px, py, numbers in groups:
        words = ", ".join(numbers[:3]) + ("…" if len(numbers) > 3 else "")
        found = _free(px, py + 4, (len(words) + 1) * CHARACTER, taken, width)
        if found is not None:  # in a crowd, the table says the rest
            parts.append(text(*found, words, "start", "number"))
    return figure(title, width, plane.HEIGHT, parts)


def _free(x: float, y: float, wide: float, taken: list[tuple[float, float, float]],
          width: float) -> tuple[float, float] | None:
    """A place for ``wide`` words next to (x, y) on which no others lie."""
    for right in (9.0, -9.0 - wide, 9.0 + wide, -9.0 - 2 * wide):
        for down in (0, 13, -13, 26, -26, 39, -39):
            left = min(max(x + right, 0.0), width - wide)
            base = min(max(y + down, 30.0), LogPlane.HEIGHT - LogPlane.BOTTOM)
            if all(left + wide <= tx or tx + tw <= left or abs(base - ty) > 12
                   for tx, ty, tw in taken):
                taken.append((left, base, wide))
                return left, base
    return None
