"""What the suites must reach, as data. ``judge`` compares a result with it.

Metrics (see ``metrics.py``): ``vs_native``, ``vs_compiled`` and ``vs_cusparse`` are speed-ups
(their time over ours), as is ``vs_dgl_cuda``, against what DGL's CUDA build took on an H200
(`metrics.CUDA`: true of no other GPU); ``vs_floor`` is our time over that of gathering the rows
once, ``int8_gain`` and ``bf16_gain`` fp32's time over that of rows in this format, ``peak_mib``
extra memory in MiB (beyond cached structure), ``rel_l2`` the difference from the host's output and
input gradient, ``ms`` and ``us`` plain times. A shape, layer or mode of "*" stands for all; the
worst of them counts.
"""
from __future__ import annotations

import dataclasses
import functools

from gnnaccel.profile.bench import metrics
from gnnaccel.profile.bench.result import Result


@dataclasses.dataclass(frozen=True)
class Target:
    """``limit`` is what must be reached; ``why`` is shown with it."""

    kind: str
    shape: str
    layer: str
    mode: str
    metric: str
    limit: float
    why: str = ""

    @property
    def at_least(self) -> bool:
        """Speed-ups must reach their limit; everything else must stay below it."""
        return self.metric in ("vs_native", "vs_compiled", "vs_dgl_cuda", "vs_cusparse",
                               "int8_gain", "bf16_gain")

    def text(self) -> str:
        where = " ".join(part for part in (self.kind, self.shape, self.layer, self.mode) if part
                         and part != "*")
        sign, why = ">=" if self.at_least else "<=", self.why and f" ({self.why})"
        return f"{where}: {self.metric} {sign} {self.limit:g}{why}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``value`` is None when the run measured nothing for the target; ``met`` is None then."""

    target: Target
    value: float | None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return (self.value >= self.target.limit if self.target.at_least
                else self.value <= self.target.limit)


def _pair(shape: str, layer: str, forward: float, training: float, metric: str = "vs_native",
          kind: str = "layer", peak_mib: float | None = None) -> list[Target]:
    peak = [Target(kind, shape, layer, "*", "peak_mib", peak_mib)] if peak_mib else []
    return [Target(kind, shape, layer, "forward", metric, forward),
            Target(kind, shape, layer, "training", metric, training), *peak]


_relation = functools.partial(_pair, kind="relation")
_over_dgl = functools.partial(_pair, metric="vs_dgl_cuda", kind="dgl")


def _ahead_of_dgl(shape: str, factor: float, forward: float, training: float) -> list[Target]:
    """``factor`` times faster than DGL's RelGraphConv, whose milliseconds on an H200 are given:
    true of no other GPU."""
    return [Target("relation", shape, "RGCN 64", mode, "ms", round(ms / factor, 2),
                   why=f"{factor:g}x DGL on an H200")
            for mode, ms in (("forward", forward), ("training", training))]


ATTENTION: tuple[Target, ...] = (
    *_pair("cora", "GAT 8x8", 2.5, 2.5),
    *_pair("arxiv", "GAT 8x8", 20, 10),
    *_pair("arxiv", "GATv2 4x16", 20, 10),
    *_pair("arxiv", "*", 2, 1.5, "vs_compiled"),
    Target("layer", "*", "*", "*", "vs_compiled", 1.0),
    *_pair("proteins", "GAT 8x8", 50, 25),
    Target("layer", "proteins", "GAT 8x8", "*", "peak_mib", 1024),
    *_pair("proteins", "GATv2 4x16", 40, 20),
    *_pair("proteins", "Transformer 1x64", 40, 20),
    *_pair("reddit", "GAT 8x8", 2.5, 8, "vs_floor"),
    Target("fresh", "*", "*", "*", "vs_native", 1.0),
    Target("layer-cpu", "*", "*", "*", "vs_native", 0.95),
    Target("structure", "reddit", "csc+csr", "*", "ms", 40),
    Target("layer", "*", "*", "forward", "rel_l2", 1e-5),
    # The gradient of leaky_relu jumps: two right fp32 results with a share s of pre-activations on
    # other sides of zero differ by the root of s. Errors against fp64 are for the tests to judge.
    Target("layer", "*", "*", "training", "rel_l2", 3e-4),
    Target("overhead", "*", "*", "*", "us", 15),
)

RELATIONAL: tuple[Target, ...] = (
    *(target for shape in ("fb15k-size", "fb15k_237") for target in (
        *_relation(shape, "RGCN 64", 50, 40), *_relation(shape, "FastRGCN 64", 10, 20),
        *_relation(shape, "RGAT 64", 15, 25, peak_mib=512))),
    *_relation("am-size", "RGCN 64", 25, 25, peak_mib=4096),
    *_relation("mag-size", "RGCN 64", 8, 8),
    *_relation("mag-inverse-size", "HGT 4x16", 20, 20, peak_mib=10240),
    # A first step, so that what is built for the graph counts too.
    Target("memory", "wikikg2-size", "RGCN 64", "training", "peak_mib", 12288),
    Target("memory", "wikikg2-size", "RGAT 64", "training", "peak_mib", 12288),
    *_relation("hetero-64", "HeteroSAGE 64", 5, 5),
    *_ahead_of_dgl("fb15k-size", 5, 9.4, 20.4),
    *_ahead_of_dgl("am-size", 3, 10.8, 21.5),
    *_ahead_of_dgl("mag-size", 3, 34, 61),
    *_ahead_of_dgl("wikikg2-size", 3, 30, 60),
    *(Target("relation-cpu", shape, layer, "*", "vs_native", 5)
      for shape in ("aifb-size", "aifb") for layer in ("FastRGCN 64", "RGAT 64")),
    Target("relation-cpu", "*", "*", "*", "vs_native", 0.95),
    Target("relation", "*", "*", "*", "rel_l2", 1e-4),
    Target("relation-cpu", "*", "*", "*", "rel_l2", 1e-4),
)

DGL: tuple[Target, ...] = (
    *_over_dgl("proteins", "GAT 8x8", 6, 4, peak_mib=1024),
    *_over_dgl("reddit", "GAT 8x8", 20, 10),
    *_over_dgl("proteins", "GATv2 4x16", 15, 8, peak_mib=1024),
    *_over_dgl("proteins", "DotGat 1x64", 4, 3),
    *_over_dgl("fb15k-size", "RelGraphConv 64", 10, 10),
    *_over_dgl("mag-inverse-size", "HGT 4x16", 30, 100),
    *_over_dgl("arxiv", "GAT 8x8", 8, 5),
    *_over_dgl("proteins", "GraphConv 64", 1.6, 1.5),
    *_over_dgl("reddit", "SAGE 64", 1.7, 1.6),
    Target("dgl", "cora", "*", "*", "vs_dgl_cuda", 1.0),
    Target("dgl-cpu", "*", "*", "*", "vs_native", 0.95),
    *(Target("dgl-cpu", "*", layer, "*", "vs_native", 1.0, why="relational layers gain")
      for layer in ("RelGraphConv 64", "HGT 4x16")),
    Target("dgl-cpu", "*", "*", "*", "rel_l2", 1e-4),
)

QUANTIZED: tuple[Target, ...] = (
    *(target for shape in ("reddit", "products") for target in (
        *_pair(shape, "GCN 128", 2.2, 1.6, "int8_gain", "quantized"),
        *_pair(shape, "SAGE 128", 2.2, 1.6, "int8_gain", "quantized"),
        *_pair(shape, "GCN 128", 1.5, 1.3, "bf16_gain", "quantized"),
        *_pair(shape, "SAGE 128", 1.5, 1.3, "bf16_gain", "quantized"))),
    *_pair("reddit", "GAT 1x128", 1.5, 1.5, "int8_gain", "quantized"),
    *_pair("reddit", "GAT 8x8", 1.5, 1.5, "int8_gain", "quantized"),
)

AGGREGATE: tuple[Target, ...] = (
    *_pair("proteins", "GCN 64", 25, 25, kind="aggregate"),
    *_pair("proteins", "GCN 64", 1.6, 1.5, "vs_dgl_cuda", "aggregate"),
    *_pair("reddit", "SAGE 64", 18, 18, kind="aggregate"),
    *_pair("reddit", "SAGE 64", 1.7, 1.6, "vs_dgl_cuda", "aggregate"),
    Target("aggregate", "products", "GCN 128", "forward", "vs_floor", 1.3),
    Target("spmm", "hub", "*", "*", "vs_cusparse", 1.5),
    Target("spmm", "*", "*", "*", "vs_cusparse", 1.0),
    Target("spmm", "uniform", "*", "forward", "vs_floor", 1.5),
    Target("fresh-plain", "fresh-10k", "*", "*", "vs_native", 1.0),
    Target("fresh-plain", "fresh-100k", "*", "*", "vs_native", 1.0),
    Target("aggregate-cpu", "*", "*", "*", "vs_native", 0.95),
    # Hubs and variances are left out: there PyG's own sums are off by 1e-3, and ours are not
    # (docs/notes/aggregate.md).
    *(Target("aggregate", shape, layer, "*", "rel_l2", 1e-4)
      for shape in ("cora", "arxiv", "proteins", "reddit")
      for layer in ("GCN 64", "SAGE 64")),
    Target("aggregate", "products", "GCN 128", "*", "rel_l2", 1e-4),
    Target("aggregate-cpu", "*", "*", "*", "rel_l2", 1e-4),
)

SUITES = (ATTENTION, RELATIONAL, DGL, AGGREGATE, QUANTIZED)


def judge(result: Result, targets: tuple[Target, ...] = ATTENTION) -> list[Verdict]:
    """Each target with the worst value that the result holds for it."""
    cells = metrics.cells(result)
    verdicts = []
    for target in targets:
        values = [value for cell in cells if _covers(target, cell)
                  if (value := cell.metric(target.metric)) is not None]
        worst = min if target.at_least else max
        verdicts.append(Verdict(target, worst(values) if values else None))
    return verdicts


def _covers(target: Target, cell: metrics.Cell) -> bool:
    return all(getattr(target, name) in ("*", getattr(cell, name))
               for name in ("kind", "shape", "layer", "mode"))
