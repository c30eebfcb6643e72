"""The cost model: bytes over bandwidth, launches, and the price of a structure over its expected
reuse.

Rates are data with their provenance (``constants.json``), scaled to the present GPU where that was
calibrated. Estimates rank candidates; they are not promises.
"""
from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

import torch

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.attention_programs import Attention
from gnnaccel.dispatch.plan.request import Request
from gnnaccel.dispatch.policy import calibration


def constants() -> dict[str, Any]:
    """The rates; for GPUs those of torch's current one, once the process uses it."""
    # to ask for its name would start CUDA, which a forked process cannot
    if not torch.cuda.is_initialized():
        return _published()
    return _for_device(_name_of(torch.cuda.current_device()))


@functools.cache
def _name_of(device: int) -> str:
    """The GPU's name; cached, since torch takes some 15 us, and every decision needs rates."""
    return torch.cuda.get_device_name(device)


@functools.cache
def _for_device(name: str) -> dict[str, Any]:
    own = calibration.of(name)
    return _published() if own is None else calibration.scaled(_published(), name, own)


@functools.lru_cache(maxsize=1)
def _published() -> dict[str, Any]:
    text = importlib.resources.files("gnnaccel.dispatch.plan").joinpath("constants.json").read_text(
        encoding="utf-8")
    return json.loads(text)


def _gather(request: Request, rows: int, size: int) -> float:
    """Seconds to gather one row of ``size`` bytes per edge from ``rows`` of them."""
    rates = constants()["cuda"]
    rate = rates["gather_l2"] if rows * size <= rates["l2_bytes"] else rates["gather_hbm"]
    return request.num_edges * size / rate


def fused(request: Request, attention: Attention, pmf: bool = False) -> float:
    """Seconds of the fused CUDA attention, forward and, with gradients, backward."""
    seconds_once = once(request, True, request.parts, _numbers(request))
    if seconds_once is not None:
        return seconds_once
    rates = constants()["cuda"]
    row = request.heads * request.width * request.row.itemsize
    terms = request.heads * 4
    if attention.family == "additive":
        gathers = [(request.num_src, row + terms)] + ([(request.num_dst, row + 3 * terms)]
                                                      if request.grad else [])
        launches = 2 + (4 if request.grad else 0)
    else:
        forward = row * (2 if attention.score == "dot" else 1)
        gathers = [(request.num_src, forward)]
        if request.grad:
            gathers += [(request.num_dst, 2 * row + 2 * terms), (request.num_src, forward)]
        launches = 1 + (4 if request.grad else 0)
    seconds = sum(_gather(request, rows, size) for rows, size in gathers)
    if attention.edge:
        seconds += len(gathers) * _gather(request, request.num_edges,
                                          row if attention.family == "pairwise" else terms)
    if pmf:  # long rows read their scores twice and take four launches
        seconds += _gather(request, request.num_src, terms) / 4
        launches += 4
    if request.fresh:
        return _over_a_new_graph(request, seconds)
    return seconds + launches * rates["launch"]


def _over_a_new_graph(request: Request, seconds: float) -> float:
    """Seconds of a call whose kernels take ``seconds``, with its part of the graph's structure,
    which is to be built. The host works while the GPU does."""
    rates, directions, which = constants()["cuda"], 1 + request.grad, int(request.grad)
    once = rates["once"]
    measured = once["layers"].get(request.native)
    launches = (measured["ours"] if measured else once["launches"])[which]
    size = "small" if request.num_edges <= once["small_edges"] else "large"
    structure = once["structure_launches"][size][which]
    host = (launches + structure / request.fresh) * rates["launch"]
    built = directions * request.num_edges * rates["structure_per_edge"] / request.fresh
    return once["margin"][measured is None] * max(host, seconds + built)


def native(request: Request) -> float | None:
    """Seconds of the host's own layer, None where nothing is known about it."""
    if request.device == "cpu":
        return _on_cpu(request, "native")
    seconds_once = once(request, False, request.parts, _numbers(request))
    if seconds_once is not None:
        return seconds_once
    rates = constants().get(request.device, {})
    passes = rates.get("native_passes", {}).get(request.native)
    if passes is None:
        return None
    which = 1 if request.grad else 0
    size = request.heads * request.width * request.row.itemsize
    moving = request.num_edges * size * passes[which] / rates["native_bandwidth"]
    if request.fresh:  # the host works while the GPU does
        return max(moving, _native_launches(request, which) * rates["launch"])
    return moving + rates["native_launches"][request.native][which] * rates["launch"]


def _native_launches(request: Request, which: int) -> int:
    """Launches of the host's own layer that kernels over a new graph save. Autograd's own thread,
    with which some were measured, is taken off: backward runs in the caller's on any route."""
    once = constants()["cuda"]["once"]
    measured = once["layers"].get(request.native)
    if measured is None:
        launches = constants()[request.device]["native_launches"][request.native][which]
        return launches - which * once["thread"]
    loops = once["loops"].get(request.native) if request.loops else None
    return measured["native"][which] + (loops[which] if loops else 0)


def torch_backend(request: Request) -> float | None:
    """Seconds of the torch backend with the CPU's margin, so that a gain within the noise is none;
    None where nothing was measured: other devices, other dtypes, and rows per edge, where it is
    much like the host."""
    attention = programs.attention(request.program)
    if attention is None or (attention.edge and attention.family == "pairwise"):
        return None
    if (request.device != "cpu" or request.row != request.out
        or request.row not in (torch.float32, torch.float64)):
        return None
    seconds = _on_cpu(request, "torch")
    if seconds is None:
        return None
    # in full: a graph may never come again, and the first layer that gains pays for all
    if request.fresh:
        seconds += line(constants()["cpu"]["structure"][mode(request)], 1, request.num_edges)
    return seconds * constants()["cpu"]["margin"]


def _on_cpu(request: Request, side: str) -> float | None:
    """Seconds on a CPU by rates of layer and mode: fixed, per edge and head, per channel of it."""
    rates = constants().get("cpu", {}).get(side, {}).get(request.native)
    if rates is None:
        return None
    edge_heads = request.num_edges * request.heads
    return line(rates[mode(request)], 1, edge_heads,
                edge_heads * request.width * request.row.itemsize / 4)


def once(request: Any, ours: bool, relations: int, numbers: float) -> float | None:
    """Seconds of a call whose graph is new on a GPU, natively or by us: mostly the CPU's time for
    reading arguments, looping over relations and building structure. ``numbers``: edges, or edges
    times channels, as the rates are. None for known graphs, and for layers of which nothing was
    measured."""
    if not request.fresh or request.device != "cuda":
        return None
    rates = constants()["relational"]["cuda"]["once"].get(request.native)
    if rates is None:
        return None
    *host, device = (*rates[mode(request)][ours], 0.0)[:4]
    return max(line(host, 1, relations, numbers), device * numbers)


def plain(request: Any, ours: bool) -> float | None:
    """`once`, of an operation of a plain layer (`ops.plain.PlainRequest`)."""
    return once(request, ours, request.parts, request.width << request.edge_bits)


def _numbers(request: Request) -> int:
    return request.num_edges * request.heads * request.width


def mode(request: Any) -> str:
    return "training" if request.grad else "forward"


def line(rates: list[float], *sizes: float) -> float:
    return sum(rate * size for rate, size in zip(rates, sizes))
