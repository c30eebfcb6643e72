"""How many Python calls gnnaccel makes in one call of a layer.

Times are noise on a shared machine; these counts are the same everywhere. `MOST` holds the upper
bounds. Lower one when a change makes a layer cheaper; raise one only with a reason that the commit
tells.
"""
from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import gnnaccel
from gnnaccel import lazy

_OURS = os.path.dirname(gnnaccel.__file__) + os.sep
_INLINED_SINCE_312 = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Counts(NamedTuple):
    """``python``: calls of gnnaccel's Python functions; ``builtin``: calls of built-in functions
    from them; ``files``: those whose functions ran."""

    python: int
    builtin: int
    files: frozenset[str]


def counted(call: Callable[[], object]) -> Counts:
    """What ``call()`` comes to."""
    seen, files = [0, 0], set()

    def profile(frame, event, arg) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            return
        if event == "call" and code.co_name not in _INLINED_SINCE_312:
            seen[0] += 1
            files.add(code.co_filename[len(_OURS):])
        elif event == "c_call":
            seen[1] += 1

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what it finds runs functions that forget
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return Counts(*seen, frozenset(files))


#: layer -> (Python, built-in) calls at most. "kernels": of a repeated call by kernels; "known": of
#: eight native calls over a graph that came before; "new": of eight over graphs new each time
MOST: dict[str, dict[str, tuple[int, int]]] = {
    "GATConv": {"kernels": (21, 45), "known": (49, 82), "new": (52, 87)},
    "GCNConv": {"kernels": (31, 81), "known": (136, 320), "new": (128, 175)},
    "SAGEConv": {"kernels": (17, 39), "known": (48, 80), "new": (48, 118)},
    "SAGEConv over a matrix": {"kernels": (26, 55), "known": (40, 80), "new": (72, 120)},
    "GINConv": {"kernels": (17, 39), "known": (48, 80), "new": (48, 118)},
    "RGCNConv": {"kernels": (49, 106), "known": (65, 99), "new": (68, 103)},
    "HGTConv": {"kernels": (122, 342), "known": (120, 165), "new": (124, 174)},
    "HeteroConv": {"kernels": (83, 204), "known": (208, 245), "new": (212, 254)},
    "a user's": {"kernels": (17, 34), "known": (48, 80), "new": (48, 118)},
    "a user's aggregate": {"kernels": (30, 40), "known": (40, 72), "new": (40, 110)},
    "a user's network": {"kernels": (71, 109), "known": (52, 114), "new": (48, 118)},
    "a user's attention": {"kernels": (26, 46), "known": (72, 104), "new": (48, 118)},
    "GATv2Conv": {"kernels": (46, 105), "known": (49, 82), "new": (52, 87)},
    "TransformerConv": {"kernels": (43, 106), "known": (49, 82), "new": (52, 87)},
    "RGATConv": {"kernels": (64, 126), "known": (49, 83), "new": (52, 87)},
    "FiLMConv": {"kernels": (90, 162), "known": (129, 99), "new": (132, 103)},
    "HEATConv": {"kernels": (164, 303), "known": (65, 108), "new": (68, 111)},
    "PNAConv": {"kernels": (61, 129), "known": (57, 90), "new": (60, 95)},
    "FiLMConv of one relation": {"kernels": (45, 85), "known": (84, 118), "new": (80, 118)},
    "PNAConv with edges": {"kernels": (62, 167), "known": (57, 90), "new": (60, 95)},
    "NNConv": {"kernels": (44, 85), "known": (81, 114), "new": (84, 119)},
    "SAGEConv of a list": {"kernels": (37, 81), "known": (56, 88), "new": (56, 126)},
    "SAGEConv of a deviation": {"kernels": (28, 53), "known": (56, 88), "new": (56, 126)},
    "HANConv": {"kernels": (77, 180), "known": (88, 149), "new": (92, 158)},
    "HeteroConv of GATConv": {"kernels": (85, 253), "known": (208, 245), "new": (212, 254)},
    "ARMAConv": {"kernels": (69, 172), "known": (184, 400), "new": (168, 292)},
    "a plain sum": {"kernels": (60, 106), "known": (56, 16), "new": (56, 16)},
    "a plain network": {"kernels": (217, 427), "known": (56, 16), "new": (56, 16)},
    "DGL GATConv": {"kernels": (59, 86), "known": (137, 193), "new": (184, 255)},
    "DGL HGTConv": {"kernels": (135, 330), "known": (401, 323), "new": (448, 385)},
    "DGL GraphConv": {"kernels": (52, 59), "known": (120, 80), "new": (160, 128)},
}
#: layer -> the same of eight calls by kernels over graphs that are new each time, and of other
#: sizes: in inference, and in training with backward. "list": that sum their lists of edges as they
#: are
FRESH: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "GATConv": ((698, 1046), (1098, 1655)),
    "TransformerConv": ((796, 1231), (1428, 2510)),
    "GCNConv": ((796, 1201), (1290, 1841)),
    "SAGEConv": ((565, 834), (1045, 1355)),
    "GINConv": ((565, 834), (997, 1291)),
    "FiLMConv of one relation": ((717, 1360), (1123, 2247)),
    "GENConv": ((652, 915), (1074, 1706)),
    "GENConv with edges": ((700, 1037), (1162, 1965)),
    "GINEConv": ((638, 961), (1052, 1703)),
    "GraphConv": ((565, 852), (997, 1309)),
    "GraphConv with weights": ((655, 1088), (1141, 1712)),
    "a user's": ((565, 773), (1006, 1246)),
    "a user's aggregate": ((655, 920), (1125, 1437)),
    "a user's generated": ((653, 1172), (1060, 1939)),
    "NNConv": ((833, 1299), (1495, 2007)),
    "PNAConv with edges": ((1135, 2231), (2090, 4299)),
    "GATv2Conv": ((837, 1459), (1471, 2811)),
    "RGCNConv": ((2531, 3409), (4359, 6148)),
    "RGATConv": ((2434, 3271), (5718, 7502)),
    "FiLMConv": ((2882, 3858), (6582, 8765)),
    "HEATConv": ((4811, 6495), (10099, 13188)),
    "HGTConv": ((3631, 6323), (7143, 12510)),
    "HANConv": ((1801, 3158), (2859, 4777)),
    "HeteroConv": ((3299, 5204), (6115, 9029)),
    "HeteroConv of GATConv": ((1932, 3751), (3110, 5778)),
    "to_hetero": ((5504, 8691), (9756, 14713)),
    "GCNConv, list": ((360, 728), (472, 1016)),
    "SAGEConv, list": ((248, 560), (360, 832)),
    "GINConv, list": ((208, 488), (320, 744)),
}
_DRAWN = 4  # calls more or fewer that eight graphs of other sizes may cost
#: route -> files at most, of gnnaccel's, whose functions run in a GATConv's call and its backward:
#: the process's first (which also finds and reads the layer's module), the first over another graph,
#: and a repeated one
FILES = {"kernels": (43, 30, 15), "native": (36, 8, 6)}


def run_modules() -> None:
    """Run gnnaccel's modules that would run when a call first uses them: no part of what it does."""
    def waiting() -> list:
        return [module for module in list(sys.modules.values()) if type(module) is lazy.Lazy]

    while modules := waiting():
        for module in modules:
            lazy.run(module)


def by_kernels(name: str, layer: Any, args: tuple, route: Any) -> None:
    """A repeated call of ``layer`` by kernels costs no more than `MOST` says."""
    with torch.no_grad(), route.on():
        for _ in range(6):
            layer(*args)
        found = counted(lambda: layer(*args))
    assert _routes() == {"cuda"}
    _judge(found, name, "kernels")


def over_new_graphs(name: str, layer: Any, inputs: Callable[[], tuple], train: bool) -> None:
    """Eight calls of ``layer`` by kernels, each over another graph, cost no more than `FRESH` says.

    ``inputs()``: arguments over a new graph. The caller sees to it that kernels run.
    """
    def run(times: int) -> None:
        for _ in range(times):
            x, *more = inputs()
            for t in x.values() if type(x) is dict else (x,):
                t.requires_grad_(train)
            out = layer(x, *more)
            if train:
                (sum(t.sum() for t in out.values()) if type(out) is dict else out.sum()).backward()

    with torch.set_grad_enabled(train):
        run(16)
        found = counted(lambda: run(8))
    assert _routes() == {"cuda"}
    python, builtin = FRESH[name][train]  # sizes are drawn: some find memory that was known
    _hold(found, (python + _DRAWN, builtin + _DRAWN),
          f"{name}, {'training' if train else 'inference'}")


def natively(name: str, layer: Any, inputs: Callable[[], tuple], graph: str) -> None:
    """The same of native calls; eight of them, since most of a streak are cheaper than the rest.

    ``inputs()``: arguments over a new graph, on a CPU.
    """
    args = inputs()  # all are kept alive, so that each is another
    calls = [inputs() if graph == "new" else args for _ in range(24)]
    with torch.no_grad(), gnnaccel.enabled(backend="cuda"):
        for args in calls[:-8]:
            layer(*args)
        found = counted(lambda: [layer(*args) for args in calls[-8:]])
    assert _routes() == {"native"}
    _judge(found, name, graph)


def _judge(found: Counts, layer: str, what: str) -> None:
    _hold(found, MOST[layer][what], f"{layer}, {what}")


def _hold(found: Counts, most: tuple[int, int], what: str) -> None:
    seen = f"{what}: {found[:2]} calls, at most {most}"
    assert found.python <= most[0] and found.builtin <= most[1], seen


def _routes() -> set[str]:
    return {route for one in gnnaccel.stats().values() for route in one["routes"]}
