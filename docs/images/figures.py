"""Draws the figures of docs/kernels.md in this folder, as SVG that follows the reader's light or dark theme.

    python docs/images/figures.py

`tests/test_figures.py` holds the files to what this makes.
"""
from __future__ import annotations

import html
from pathlib import Path

HERE = Path(__file__).resolve().parent
STYLE = """svg { color-scheme: light dark; font: 13px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
text { fill: #1c2024; } .soft { fill: #56606b; font-size: 12px; } .title { font-weight: 600; }
.on { fill: #ffffff; } .box { fill: #f5f7f9; stroke: #c3cad1; } .ours { fill: #1668b8; } .host { fill: #8d98a4; } .second { fill: #b0640c; }
.pale { fill: #c9dff5; } .line { stroke: #56606b; stroke-width: 1.4; fill: none; } .tip { fill: #56606b; }
.paper { fill: #ffffff; }
@media (prefers-color-scheme: dark) { text { fill: #e6e9ed; } .soft { fill: #a3adb8; } .on { fill: #14171b; } .paper { fill: #14171b; }
.box { fill: #1d2228; stroke: #444c55; } .ours { fill: #5aa9ee; } .host { fill: #78838f; } .second { fill: #e3a455; }
.pale { fill: #27435c; } .line { stroke: #a3adb8; } .tip { fill: #a3adb8; } }"""


class Figure:
    """Shapes with coordinates in pixels, the origin at the upper left."""

    def __init__(self, title: str, width: float, height: float):
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, css: str = "box", words: str = "", ink: str = "") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" class="{css}"/>')
        if words:
            self.text(x + w / 2, y + h / 2 + 4.5, words, "middle", ink)

    def text(self, x: float, y: float, words: str, anchor: str = "start", css: str = "") -> None:
        kind = f' class="{css}"' if css else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{html.escape(words)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Straight; its head is 6 pixels long."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - 6 * dx, y2 - 6 * dy
        self.parts.append(f'<path d="M{x1:g} {y1:g}L{bx:.1f} {by:.1f}" class="line"/>')
        tip = f"M{x2:g} {y2:g}L{bx - 3.5 * dy:.1f} {by + 3.5 * dx:.1f}L{bx + 3.5 * dy:.1f} {by - 3.5 * dx:.1f}Z"
        self.parts.append(f'<path d="{tip}" class="tip"/>')

    def svg(self) -> str:
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
                f'height="{self.height:g}" role="img"><title>{html.escape(self.title)}</title><style>{STYLE}</style>'
                f'<rect width="{self.width:g}" height="{self.height:g}" class="paper"/>{"".join(self.parts)}</svg>\n')


def traffic() -> Figure:
    """What goes through memory: the host's operations against one pass."""
    f = Figure("an attention layer step by step, and in one pass", 760, 330)
    f.text(20, 28, "The host: a kernel for each step, each reads and writes rows per edge", css="title")
    steps = (("gather", "E x H"), ("leaky_relu", "E x H"), ("max, exp, sum", "3 (E x H)"), ("gather rows", "E x H x C"),
             ("weigh", "E x H x C"), ("scatter", "N x H x C"))
    for i, (name, size) in enumerate(steps):
        x = 20 + i * 122
        f.box(x, 46, 104, 34, words=name)
        if i < len(steps) - 1:
            f.arrow(x + 104, 63, x + 121, 63)
        f.arrow(x + 52, 80, x + 52, 103)
        tall = {"E x H": 16, "3 (E x H)": 34, "E x H x C": 64, "N x H x C": 14}[size]
        f.box(x + 10, 104, 84, tall, "host" if "E" in size else "ours")
        f.text(x + 52, 122 + tall, size, "middle", "soft")
    f.text(20, 226, "gnnaccel: one pass per destination, the rows of its neighbours read once", css="title")
    f.box(20, 244, 150, 58, words="rows of nodes")
    f.arrow(170, 273, 215, 273)
    f.box(216, 238, 310, 70)
    f.text(371, 264, "score, softmax and sum in registers", "middle")
    f.text(371, 286, "a running maximum rescales what was summed", "middle", "soft")
    f.arrow(526, 273, 571, 273)
    f.box(572, 258, 84, 14, "ours")
    f.text(614, 290, "N x H x C", "middle", "soft")
    return f


def lanes() -> Figure:
    """A warp over rows of 8 heads x 8 channels: VEC 4, two lanes a head, eight heads side by side, two rows."""
    f = Figure("how the 32 lanes of a warp lie over rows", 760, 250)
    f.text(20, 28, "8 heads x 8 channels: 16 lanes hold a row, a warp two rows side by side", css="title")
    for lane in range(32):
        x = 20 + lane * 22.5
        head = lane % 16 // 2
        f.box(x, 62, 20.5, 30, "ours" if head % 2 == 0 else "pale", str(lane % 16), "on" if head % 2 == 0 else "")
        if lane % 2 == 0:
            f.text(x + 21.5, 54, f"h{head}", "middle", "soft")
    for slot in range(2):
        f.text(20 + slot * 360 + 180, 112, f"slot {slot}: 64 numbers of one neighbour's row", "middle", "soft")
    f.text(20, 150, "1 head x 64 channels: the same 16 lanes, all of one head", css="title")
    for lane in range(32):
        f.box(20 + lane * 22.5, 166, 20.5, 30, "ours" if lane < 16 else "pale", str(lane % 16), "on" if lane < 16 else "")
    f.text(20, 222, "Every lane reads 16 bytes at once, four numbers of fp32, and neighbouring lanes neighbouring bytes; an inner product",
           css="soft")
    f.text(20, 240, "per head is summed across its lanes by shuffles. Odd sizes leave lanes idle, not wrong.", css="soft")
    return f


def phases() -> Figure:
    """SMMF: scores edge-parallel, sums feature-parallel."""
    f = Figure("the two phases over 32 edges of one destination", 760, 300)
    f.text(20, 28, "Phase 1: a lane is an edge", css="title")
    f.text(400, 28, "Phase 2: a lane is a part of the row", css="title")
    for i in range(32):
        f.box(20 + i * 10, 44, 8.5, 22, "pale")
    f.text(20, 86, "32 edges, one lane each: the score of an edge is a few", css="soft")
    f.text(20, 102, "numbers (a_src[j] + a_dst[i]), not a row", css="soft")
    f.arrow(180, 112, 180, 134)
    f.box(20, 136, 320, 34, words="exp(score - maximum), in shared memory")
    f.text(20, 192, "Scored by the lanes that hold rows, the same score would", css="soft")
    f.text(20, 208, "be worked out once per lane.", css="soft")
    f.arrow(340, 153, 398, 153)
    for row, y in enumerate((44, 76, 108, 140)):
        for i in range(8):
            f.box(400 + i * 42, y, 40, 24, "ours" if row % 2 == 0 else "pale")
    f.text(400, 184, "for each of the 32 edges: weight x row, all lanes at once;", css="soft")
    f.text(400, 200, "several rows are on their way while one is added", css="soft")
    f.arrow(566, 210, 566, 232)
    f.box(400, 234, 334, 30, "box", "sum, in registers until the row ends")
    f.text(20, 286, "The maximum grows as edges come; what was summed before is then scaled down (online softmax).", css="soft")
    return f


def split() -> Figure:
    """Long rows cut into chunks."""
    f = Figure("long rows are cut into chunks", 760, 250)
    f.text(20, 28, "One warp per destination: the hub keeps one warp busy while the others wait", css="title")
    for i, (edges, words) in enumerate(((14, ""), (700, "a hub"), (32, ""), (9, ""))):
        f.box(20, 42 + i * 16, edges, 12, "second" if words else "host")
    f.text(20, 142, "Rows beyond a length are cut into chunks; a second, small kernel merges them", css="title")
    for i, edges in enumerate((14, 32, 9)):
        f.box(20, 156 + i * 16, edges, 12, "host")
    for i in range(6):
        f.box(120 + i * 78, 156, 74, 12, "second")
        f.arrow(157 + i * 78, 170, 157 + i * 78, 190)
        f.box(137 + i * 78, 192, 40, 12, "ours")
    f.text(600, 167, "chunks, a warp each", css="soft")
    f.text(600, 203, "maximum, sum and row", css="soft")
    f.arrow(354, 208, 354, 224)
    f.box(254, 226, 200, 14, "ours")
    f.text(466, 238, "merged in a fixed order", css="soft")
    return f


def pairs() -> Figure:
    """Compaction: values per (node, relation) pair instead of per edge."""
    f = Figure("relational layers: once per pair, not once per edge", 760, 312)
    f.text(20, 28, "Edges", css="title")
    f.text(290, 28, "Distinct (source, relation) pairs", css="title")
    f.text(560, 28, "Destinations", css="title")
    edges = (("a", 0, 0), ("a", 0, 1), ("a", 0, 2), ("b", 0, 1), ("b", 1, 2), ("b", 1, 0), ("c", 1, 2))
    pairs_of = sorted({(relation, source) for source, relation, _ in edges})
    places = {pair: 58 + i * 46 for i, pair in enumerate(pairs_of)}
    for i, (source, relation, _) in enumerate(edges):
        y = 44 + i * 30
        f.box(20, y, 130, 22, "second" if relation else "ours", f"{source}, relation {relation}", "on")
        f.arrow(152, y + 11, 288, places[relation, source] + 13)
    for (relation, source), y in places.items():
        f.box(290, y, 150, 26, "second" if relation else "ours", f"{source} W{relation}", "on")
    for source, relation, target in edges:
        f.arrow(442, places[relation, source] + 13, 558, 83 + target * 66)
    for i in range(3):
        f.box(560, 70 + i * 66, 120, 26, "box", f"sum of {sum(t == i for *_, t in edges)}")
    f.text(20, 284, "7 products of a row with a matrix become 4. Pairs are sorted by relation: each relation's rows are one block of",
           css="soft")
    f.text(20, 300, "a single product on tensor cores (segment GEMM), and the sums read them by index.", css="soft")
    return f


FIGURES = {"traffic": traffic, "lanes": lanes, "phases": phases, "split": split, "pairs": pairs}


def main() -> None:
    for name, draw in FIGURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
