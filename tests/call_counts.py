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
    "GATConv": {"kernels": (21, 43), "known": (50, 82), "new": (52, 87)},
    "GCNConv": {"kernels": (30, 76), "known": (136, 312), "new": (128, 149)},
    "SAGEConv": {"kernels": (16, 35), "known": (48, 72), "new": (48, 92)},
    "SAGEConv over a matrix": {"kernels": (25, 51), "known": (40, 72), "new": (72, 96)},
    "GINConv": {"kernels": (16, 35), "known": (48, 72), "new": (48, 92)},
    "RGCNConv": {"kernels": (47, 111), "known": (66, 99), "new": (68, 103)},
    "HGTConv": {"kernels": (116, 375), "known": (120, 165), "new": (124, 174)},
    "HeteroConv": {"kernels": (81, 208), "known": (208, 245), "new": (212, 254)},
    "a user's": {"kernels": (16, 31), "known": (48, 72), "new": (48, 92)},
    "GATv2Conv": {"kernels": (49, 114), "known": (50, 82), "new": (52, 87)},
    "TransformerConv": {"kernels": (43, 121), "known": (50, 82), "new": (52, 87)},
    "RGATConv": {"kernels": (62, 133), "known": (50, 83), "new": (52, 87)},
    "FiLMConv": {"kernels": (88, 191), "known": (130, 99), "new": (132, 103)},
    "HEATConv": {"kernels": (163, 312), "known": (66, 108), "new": (68, 111)},
    "PNAConv": {"kernels": (49, 165), "known": (58, 90), "new": (60, 95)},
    "FiLMConv of one relation": {"kernels": (94, 81), "known": (82, 79), "new": (80, 92)},
    "PNAConv with edges": {"kernels": (50, 212), "known": (58, 90), "new": (60, 95)},
    "SAGEConv of a list": {"kernels": (72, 81), "known": (56, 80), "new": (56, 100)},
    "SAGEConv of a deviation": {"kernels": (42, 51), "known": (56, 80), "new": (56, 100)},
    "HANConv": {"kernels": (96, 215), "known": (88, 149), "new": (92, 158)},
    "HeteroConv of GATConv": {"kernels": (82, 218), "known": (208, 245), "new": (212, 254)},
    "ARMAConv": {"kernels": (70, 162), "known": (184, 384), "new": (168, 240)},
    "DGL GATConv": {"kernels": (59, 95), "known": (138, 193), "new": (184, 255)},
    "DGL HGTConv": {"kernels": (130, 347), "known": (402, 324), "new": (448, 387)},
    "DGL GraphConv": {"kernels": (52, 58), "known": (120, 80), "new": (160, 128)},
}
#: layer -> the same of eight calls by kernels over graphs that are new each time, and of other
#: sizes: in inference, and in training with backward. "list": that sum their lists of edges as they
#: are
FRESH: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "GATConv": ((713, 1122), (1129, 1834)),
    "TransformerConv": ((811, 1318), (1459, 2675)),
    "GCNConv": ((831, 1218), (1365, 1927)),
    "SAGEConv": ((593, 865), (1111, 1452)),
    "GINConv": ((593, 865), (1047, 1388)),
    "FiLMConv of one relation": ((944, 1384), (1606, 2172)),
    "GENConv": ((672, 931), (1118, 1615)),
    "GENConv with edges": ((728, 1035), (1222, 1855)),
    "GINEConv": ((689, 962), (1135, 1598)),
    "GraphConv": ((593, 867), (1047, 1390)),
    "GraphConv with weights": ((691, 1077), (1217, 1769)),
    "a user's": ((593, 837), (1055, 1375)),
    "a user's generated": ((840, 1278), (1470, 2009)),
    "PNAConv with edges": ((1006, 2207), (1788, 3240)),
    "GATv2Conv": ((876, 1537), (1524, 2959)),
    "GCNConv, list": ((368, 664), (480, 944)),
    "SAGEConv, list": ((248, 520), (368, 776)),
    "GINConv, list": ((208, 448), (328, 688)),
}
#: files at most, of gnnaccel's, whose functions run in a GATConv's first call by kernels, and in a
#: repeated one
FILES = (35, 13)


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
            out = layer(x.requires_grad_(train), *more)
            if train:
                out.sum().backward()

    with torch.set_grad_enabled(train):
        run(16)
        found = counted(lambda: run(8))
    assert _routes() == {"cuda"}
    _hold(found, FRESH[name][train], f"{name}, {'training' if train else 'inference'}")


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
