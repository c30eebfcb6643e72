"""Python's cost of a memoised call: an enabled layer against the same work done by hand."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.profile.bench import accel, shapes, timing
from gnnaccel.profile.bench.steps import Step


def cpu_us(call: Callable[[], object], device: torch.device, calls: int = 200,
           loops: int = 15) -> float:
    """CPU time of one call in microseconds: median over loops that do not wait for the device
    inside.

    Valid while the device keeps up (small graphs): otherwise a full launch queue would be counted
    as CPU time.
    """
    samples = []
    for _ in range(loops):
        timing.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(samples[1:])


def measure_overhead(device: torch.device, quick: bool = False) -> dict:
    """Microseconds per GAT 8x8 forward on the cora shape: ``enabled_us``, ``bare_us`` and their gap
    ``overhead_us``. ``quick``: from few calls, to see that it runs.

    The gap is what patching, rules, planning, the memo and the structure cache cost together with
    the call of the layer as a module. Nothing of the host's own forward is in either.
    """
    graph = shapes.make(shapes.SHAPES["cora"], device)
    spec = pyg.resolve("GAT 8x8")
    effort = (20, 3) if quick else ()
    step = Step(pyg.build_layer(spec, device), graph, "forward", spec.out_channels)
    with accel.accelerated():
        enabled = cpu_us(step, device, *effort)
    bare = cpu_us(bare_gat(step, graph), device, *effort)
    return {"enabled_us": enabled, "bare_us": bare, "overhead_us": enabled - bare}


def bare_gat(step: Step, graph: shapes.Graph) -> Callable[[], torch.Tensor]:
    """The GAT layer's forward by hand: its projection and the two launches, all else done before.
    """
    from gnnaccel.cuda import additive, head_dot
    from gnnaccel.dispatch.graph.view import GraphView

    layer: Any = step.module
    nodes = graph.num_nodes
    heads, width = layer.heads, layer.out_channels
    att_src, att_dst = (att.detach().reshape(heads, width).contiguous()
                        for att in (layer.att_src, layer.att_dst))
    rows = GraphView(graph.edge_index, nodes, nodes, loops=nodes).csc(places=False)
    variant = additive.variant(heads, width, step.x.dtype, step.x.dtype)
    bias, slope = layer.bias.detach(), layer.negative_slope

    def call() -> torch.Tensor:
        # The step enters no_grad in every call, so this must pay for that as well.
        with torch.no_grad():
            x = layer.lin(step.x).view(nodes, heads, width)
            a_src, a_dst = head_dot.dot(x, att_src, att_dst)
            out, _ = additive.forward(variant, rows, a_src, a_dst, x, slope, bias=bias)
            return out.view(nodes, heads * width)

    return call
