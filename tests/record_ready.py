"""Writes gnnaccel/cuda/ready.json: the texts (family, definitions) that a wheel brings compiled.

    python -m tests.record_ready         what models like those of PyG's examples ask for
    python -m tests.record_ready --merge noted.json --arch 90
                                         and what a run on a GPU of this compute capability made:
                                         a JSON list of `driver.noted()`, or of (family, defines)

What was merged before is not kept: name all lists. Kernels are asked for and not run, but for those
that make a graph's index arrays. Plans of products by segment depend on the shared memory that a
block may have, so each model is asked once for each such limit, and a text is listed with the
architectures that ask for it.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch_geometric.nn import (AGNNConv, GATConv, GATv2Conv, GCNConv, GINConv, HANConv, HGTConv, RGCNConv,
                                SAGEConv, TransformerConv)

import gnnaccel
from gnnaccel.cuda import adam
from gnnaccel.cuda.runtime import driver, sources
from gnnaccel.cuda.runtime.nvrtc import ARCHITECTURES
from gnnaccel.cuda.runtime.ready import LIST, Text
from gnnaccel.cuda.segment import segment_plan
from gnnaccel.cuda.structures import join, pairs, structure
from gnnaccel.dispatch.plan import compiling, planner
from tests.emulation.emulator import EmulatedDriver
from tests.pyg import test_first_run as models

WIDTHS = (16, 32, 64, 128, 256)
HEADS = ((8, 8), (4, 32), (1, 64), (2, 64))
#: classes of PubMed, CiteSeer, Cora, ogbn-arxiv and ogbn-products, which last layers have as channels
CLASSES = (3, 6, 7, 40, 47)
#: channels that first layers sum: PPI, ogbn-products, Flickr, Reddit, Cora
FEATURES = (50, 100, 500, 602, 1433)
#: families whose definitions depend on the shared memory that a block may have
_BY_SHARED = frozenset(("segment_gemm", "segment_direct", "segment_gemm_grad", "segment_backward"))
#: families whose results other code takes as indices: these run
_INDICES = frozenset(("structure", "row_split", "row_order", "pairs", "join", "tile_ptr"))


class Asked(EmulatedDriver):
    """Notes which texts are asked for. Only kernels that make index arrays run."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: set[Text] = set()

    def kernel(self, family, entry, defines=()):
        if not sources.is_written(family):
            self.texts.add((family, defines))
        return super().kernel(family, entry, defines) if family in _INDICES else _nothing


def _nothing(*args) -> None:
    """A kernel that leaves memory as it is."""


def cases() -> Iterator[Callable[[], tuple]]:
    """Makers of models with their arguments."""
    yield from models.MODELS.values()
    for width in WIDTHS:
        yield from _layers(width)
    for heads, width in HEADS:
        yield from _attention(heads, width)
    for width in FEATURES:
        yield functools.partial(models._over_edges, models.Layers(SAGEConv(width, 64)), width)
    for classes in CLASSES:
        for layer in (GCNConv(16, classes), SAGEConv(64, classes),
                      GATConv(64, classes, heads=1, concat=False, dropout=0.6)):
            yield functools.partial(models._over_edges, models.Layers(layer), layer.in_channels)


def _layers(width: int) -> Iterator[Callable[[], tuple]]:
    for layer in (GCNConv(16, width), SAGEConv(width, width), GINConv(nn.Linear(width, width))):
        yield functools.partial(models._over_edges, models.Layers(layer), width
                                if not isinstance(layer, GCNConv) else 16)
    if width <= 64:
        yield functools.partial(models._over_edges, models.Layers(AGNNConv()), width)
    relations = torch.randint(0, 5, (models.EDGES,))
    yield functools.partial(models._over_edges, models.Layers(RGCNConv(width, width, 5)), width,
                            relations)
    graph = (list(models.SIZES), models.RELATIONS)
    yield lambda: models._over_types(models.Layers(HGTConv(width, width, graph, 4)),
                                     models._wide(width))


def _attention(heads: int, width: int) -> Iterator[Callable[[], tuple]]:
    whole = heads * width
    for layer in (GATConv, GATv2Conv, TransformerConv):
        for dropout in (0.0, 0.5):
            one = models.Layers(layer(whole, width, heads=heads, dropout=dropout))
            yield functools.partial(models._over_edges, one, whole)
    names = [("movie", name, "movie") for name in ("first", "second")]
    han = HANConv(16, whole, heads=heads, metadata=(["movie"], names))
    edges = {name: torch.randint(0, models.NODES, (2, 200)) for name in names}
    yield lambda: (models.Layers(han), ({"movie": torch.randn(models.NODES, 16)}, edges))


@contextlib.contextmanager
def _first_use() -> Iterator[Asked]:
    """A driver in place, on a machine that has no kernels yet: likely kernels are asked for,
    too."""
    one, compiled = Asked(), compiling._compiled

    def first(whole, key, compile_, later):
        found = compiled(whole, key, compile_, later)
        if later is not None:
            later()
        return found

    with mock.patch.object(compiling, "_compiled", first), driver.using(one):
        planner.forget()
        yield one


def recorded(arch: int) -> set[Text]:
    """What the models ask for on a GPU of this compute capability. Plans are kept once they are
    made, so each process records one."""
    segment_plan.EMULATED = arch
    torch.manual_seed(0)
    with _first_use() as asked, gnnaccel.enabled(backend="cuda", when="supported"):
        for prepare in (structure.prepare, pairs.prepare, join.prepare, adam.prepare):
            prepare()
        for make in cases():
            models._run(*make())
    return asked.texts


def _apart(function: Callable, argument: int) -> set[Text]:
    """By a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(function, (argument,))


def merged(path: Path) -> set[Text]:
    """The texts of a list that a run on a GPU has written."""
    noted = json.loads(path.read_text(encoding="utf-8"))
    return {(one[0], tuple(map(tuple, one[-1]))) for one in noted if not sources.is_written(one[0])}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.record_ready")
    parser.add_argument("--merge", type=Path, action="append", default=[])
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, default=90)
    options = parser.parse_args(arguments)
    found: dict[Text, set[int]] = {}
    by_limit: dict[int, list[int]] = {}
    for arch in ARCHITECTURES:
        by_limit.setdefault(segment_plan.shared_of(arch), []).append(arch)
    for archs in by_limit.values():
        for text in _apart(recorded, archs[0]):
            found.setdefault(text, set()).update(archs)
    for path in options.merge:
        for text in merged(path):
            limit = segment_plan.shared_of(options.arch)
            found.setdefault(text, set()).update(by_limit[limit] if text[0] in _BY_SHARED
                                                 else ARCHITECTURES)
    lines = [json.dumps([family, [list(pair) for pair in defines],
                         *([] if archs == set(ARCHITECTURES) else [sorted(archs)])])
             for (family, defines), archs in sorted(found.items())]
    LIST.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{len(lines)} texts, {sum(map(len, found.values()))} cubins: {LIST}")


if __name__ == "__main__":
    main()
