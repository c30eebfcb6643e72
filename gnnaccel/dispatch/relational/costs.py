"""Estimates for relational calls: ours by counting, the host's by rates that were measured."""
from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING

from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.plan.cost import line, mode
from gnnaccel.dispatch.relational import optimise

if TYPE_CHECKING:
    from gnnaccel.dispatch.relational.counting import Count
    from gnnaccel.dispatch.relational.optimise import Ordering
    from gnnaccel.dispatch.relational.request import RelationalRequest


def cuda(request: RelationalRequest) -> float:
    """Seconds by the CUDA kernels."""
    return _taken(request, "cuda").seconds + _around(request) + _structure(request, "cuda")


def _around(request: RelationalRequest) -> float:
    """Seconds of the work around the Program: rows laid side by side, weights of types put
    together."""
    rates = cost.constants()["relational"]["cuda"]["around"].get(request.native)
    if rates is None:
        return 0.0
    shapes = dict(request.shapes)
    moved = (1 << request.edge_bits) * sum(shapes["weight"][-2:]) * request.row.itemsize
    return line(rates[mode(request)], 1, *shapes["types"], moved)


def torch_backend(request: RelationalRequest) -> float | None:
    """Seconds by the torch backend on a CPU, with the margin within which a gain is none; None on
    other devices."""
    if request.device != "cpu":
        return None
    rates, count = cost.constants()["relational"]["cpu"], _taken(request, "cpu").count
    seconds = _total(rates["total"][mode(request)], count, 1 << request.relation_bits)
    around = rates["around"].get(request.native)
    return seconds * rates["margin"] + _structure(request,
                                                  "cpu") + (0.0
                                                            if around is None
                                                            else around[mode(request)])


def native(request: RelationalRequest) -> float | None:
    """Seconds of the host's own layer, None where nothing is known about it."""
    rates = cost.constants()["relational"].get(request.device,
                                               {}).get("native", {}).get(request.native)
    if request.device == "cuda":
        return _native_once(request) if rates is None else _one_by_one(request, rates)
    if rates is None:
        return None
    statistics = request.statistics()
    relations, edges = statistics.num_relations, statistics.num_edges
    width, matrix = _sizes(request)
    return line(rates[mode(request)], 1, relations, relations * statistics.num_dst * matrix,
                edges * width, edges * matrix)


def _native_once(request: RelationalRequest) -> float | None:
    """Seconds of a host on a GPU without rates: over known graphs kernels always gain, over new
    ones there is the structure to pay for."""
    return cost.once(request, False, 1 << request.relation_bits,
                     (1 << request.edge_bits) * _sizes(request)[0])


def _one_by_one(request: RelationalRequest, rates: dict[str, list[float]]) -> float:
    """Seconds of a host that makes a product per relation on a GPU: their launches, or the products
    where those take longer."""
    ordering, unit = _taken(request,
                            "cuda"), cost.constants()["relational"]["cuda"]["orderings"]["launch"]
    products = ordering.seconds - (ordering.count + ordering.back).launches * unit
    return max(line(rates[mode(request)], 1, *dict(request.shapes)["types"]), products)


@functools.lru_cache(maxsize=4096)
def _cheapest(program, shapes, statistics, device: str, train: bool) -> Ordering:
    return optimise.optimise(program, dict(shapes), statistics, device, train=train).taken


def _taken(request: RelationalRequest, device: str) -> Ordering:
    return _cheapest(request.program, request.shapes, request.statistics(), device,
                     request.grad and device == "cuda")


def _structure(request: RelationalRequest, device: str) -> float:
    """Seconds of making the structure, in full where the graph is new: it may never come again."""
    once = cost.once(request, True, 1 << request.relation_bits, 1 << request.edge_bits)
    if once is not None:
        return once
    rates = cost.constants()["relational"][device]["structure"][mode(request)]
    return line(rates, 1, 1 << request.edge_bits) if request.fresh else 0.0


def _total(rates: list[float], count: Count, relations: int) -> float:
    return line(rates, count.moved, count.flops, count.launches, relations, 1)


def _sizes(request: RelationalRequest) -> tuple[int, int]:
    """Channels of a row, and elements of the largest input: one relation's matrix."""
    width = request.shapes[0][1][-1] if request.shapes[0][1] else 1
    return width, max(prod(shape) for _, shape in request.shapes)
