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
    "GATConv": {"kernels": (20, 44), "known": (34, 67), "new": (37, 72)},
    "GCNConv": {"kernels": (29, 81), "known": (120, 320), "new": (90, 148)},
    "SAGEConv": {"kernels": (16, 39), "known": (40, 80), "new": (34, 91)},
    "SAGEConv over a matrix": {"kernels": (25, 55), "known": (32, 80), "new": (34, 91)},
    "GINConv": {"kernels": (16, 39), "known": (40, 80), "new": (34, 91)},
    "RGCNConv": {"kernels": (48, 105), "known": (50, 84), "new": (53, 88)},
    "HGTConv": {"kernels": (121, 342), "known": (89, 150), "new": (93, 159)},
    "HeteroConv": {"kernels": (82, 203), "known": (153, 230), "new": (157, 239)},
    "a user's": {"kernels": (16, 34), "known": (40, 80), "new": (34, 91)},
    "a user's aggregate": {"kernels": (29, 40), "known": (32, 72), "new": (26, 83)},
    "a user's network": {"kernels": (66, 109), "known": (42, 94), "new": (34, 91)},
    "a user's attention": {"kernels": (25, 46), "known": (64, 104), "new": (34, 91)},
    "GATv2Conv": {"kernels": (44, 104), "known": (34, 67), "new": (37, 72)},
    "TransformerConv": {"kernels": (41, 105), "known": (34, 67), "new": (37, 72)},
    "RGATConv": {"kernels": (63, 125), "known": (34, 68), "new": (37, 72)},
    "FiLMConv": {"kernels": (89, 161), "known": (114, 84), "new": (117, 88)},
    "HEATConv": {"kernels": (162, 301), "known": (42, 93), "new": (45, 96)},
    "PNAConv": {"kernels": (60, 128), "known": (42, 75), "new": (45, 80)},
    "FiLMConv of one relation": {"kernels": (43, 85), "known": (74, 98), "new": (66, 91)},
    "PNAConv with edges": {"kernels": (61, 166), "known": (42, 75), "new": (45, 80)},
    "NNConv": {"kernels": (43, 84), "known": (66, 99), "new": (69, 104)},
    "SAGEConv of a list": {"kernels": (36, 81), "known": (48, 88), "new": (42, 99)},
    "SAGEConv of a deviation": {"kernels": (27, 53), "known": (48, 88), "new": (42, 99)},
    "HANConv": {"kernels": (75, 179), "known": (73, 134), "new": (77, 143)},
    "HeteroConv of GATConv": {"kernels": (84, 250), "known": (153, 230), "new": (157, 239)},
    "ARMAConv": {"kernels": (66, 172), "known": (160, 400), "new": (116, 238)},
    "a plain sum": {"kernels": (59, 106), "known": (56, 16), "new": (56, 16)},
    "a plain network": {"kernels": (204, 427), "known": (56, 16), "new": (56, 16)},
    "DGL GATConv": {"kernels": (59, 86), "known": (137, 193), "new": (184, 255)},
    "DGL HGTConv": {"kernels": (135, 330), "known": (401, 323), "new": (448, 385)},
    "DGL GraphConv": {"kernels": (52, 59), "known": (120, 80), "new": (160, 128)},
}
#: layer -> the same of eight calls by kernels over graphs that are new each time, and of other
#: sizes: in inference, and in training with backward. "list": that sum their lists of edges as they
#: are
FRESH: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "GATConv": ((682, 1038), (1082, 1647)),
    "TransformerConv": ((778, 1221), (1394, 2502)),
    "GCNConv": ((748, 1201), (1234, 1839)),
    "SAGEConv": ((544, 834), (1014, 1355)),
    "GINConv": ((544, 834), (966, 1291)),
    "FiLMConv of one relation": ((710, 1360), (1116, 2247)),
    "GENConv": ((645, 915), (1067, 1706)),
    "GENConv with edges": ((693, 1037), (1155, 1965)),
    "GINEConv": ((631, 961), (1045, 1703)),
    "GraphConv": ((544, 852), (966, 1309)),
    "GraphConv with weights": ((632, 1088), (1110, 1712)),
    "a user's": ((544, 773), (974, 1246)),
    "a user's aggregate": ((647, 920), (1118, 1437)),
    "a user's generated": ((646, 1172), (1052, 1938)),
    "NNConv": ((827, 1289), (1489, 1999)),
    "PNAConv with edges": ((1125, 2223), (2086, 4291)),
    "GATv2Conv": ((819, 1449), (1467, 2803)),
    "RGCNConv": ((2525, 3403), (4285, 6140)),
    "RGATConv": ((2428, 3261), (5604, 7494)),
    "FiLMConv": ((2876, 3852), (6468, 8757)),
    "HEATConv": ((4795, 6479), (9813, 13172)),
    "HGTConv": ((3636, 6315), (7148, 12502)),
    "HANConv": ((1793, 3150), (2851, 4769)),
    "HeteroConv": ((3293, 5194), (6101, 9021)),
    "HeteroConv of GATConv": ((1924, 3743), (3102, 5770)),
    "to_hetero": ((5504, 8671), (9712, 14697)),
    "GCNConv, list": ((328, 728), (440, 1016)),
    "SAGEConv, list": ((240, 560), (352, 832)),
    "GINConv, list": ((200, 488), (312, 744)),
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
