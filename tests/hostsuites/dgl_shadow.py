"""Every call of DGL's message passing that gnnaccel may take over, made a second time by DGL's own
code and compared.

`install` puts a comparison around each routed operation and each routed layer. It calls both on
copies of the operands, on the host for a bridged DGL, holds values against each other, and then
gradients for a random cotangent. What differs is kept until `taken`. The test goes on with the
result of a third call, so that it sees what it would see without a shadow.
"""
from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import gnnaccel

#: what may differ, of the largest value of the tensor: sums are made in other orders
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_alarms: list[str] = []
_running = False
_compared = 0


def taken() -> tuple[int, list[str]]:
    """How many calls were compared, and what differed, since the last time this was asked."""
    global _compared
    found = _compared, _alarms[:]
    _alarms.clear()
    _compared = 0
    return found


def install() -> None:
    """Compare every call from now on, in this process. gnnaccel is enabled, and DGL imported."""
    from dgl.backend.pytorch import sparse

    from gnnaccel.adapters.dgl.ops import replaced
    from gnnaccel.dispatch.observe import watch

    natives = {getattr(sparse, name, None) for name in replaced.ROUTED} - {None}
    for module in replaced._modules():
        for name, value in list(vars(module).items()):
            native = getattr(value, "__wrapped__", None) if inspect.isfunction(value) else None
            if native is not None and native in natives:
                setattr(module, name, _operation(value, native))
    watch.add(_watch, _ignore)  # a `forward` that somebody replaced would run natively


def _operation(ours: Any, native: Any) -> Any:
    @functools.wraps(ours)
    def operation(*args: Any, **kwargs: Any) -> Any:
        _compare(ours.__name__, lambda a, k: ours(*a, **k), lambda a, k: native(*a, **k), args,
                 kwargs)
        return ours(*args, **kwargs)

    return operation


def _ignore(record: Any) -> None:
    """Records are not looked at: watchers are asked while somebody listens."""


def _watch(visit: Any, run: Any) -> Any:
    layer = visit.layer
    if isinstance(layer, torch.nn.Module) and visit.adapter is not None:
        ours = type(layer).forward
        native = inspect.unwrap(ours)
        if not (layer.training
                and any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in layer.modules())):
            _compare(type(layer).__name__, lambda a, k: ours(*a, **k), lambda a, k: native(*a, **k),
                     (layer, *visit.args), visit.kwargs)
    return run(visit)


def _compare(name: str, ours: Any, native: Any, args: tuple, kwargs: dict) -> None:
    global _running, _compared
    if _running or torch.compiler.is_compiling():
        return
    _running = True
    cpu, cuda = (torch.get_rng_state(),
                 torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)
    try:
        found = _both(ours, native, args, kwargs)
        if found is not None:
            _compared += 1
            _alarms.extend(f"{name}{_shapes(args, kwargs)}: {text}" for text in found)
    finally:
        _running = False
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def _both(ours: Any, native: Any, args: tuple, kwargs: dict) -> list[str] | None:
    """What differs; None where one of them refuses the call."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    tensors += [p for m in tree_leaves((args, kwargs)) if isinstance(m, torch.nn.Module)
                for p in m.parameters()]
    on_host = all(t.device.type == "cpu" for t in tensors)
    one, mine = _copied(args, kwargs, False)
    other, theirs = _copied(args, kwargs, not on_host)
    state = torch.get_rng_state()
    try:
        got = ours(*one)
    except Exception:
        return None  # the test sees it
    torch.set_rng_state(state)
    try:
        with gnnaccel.disabled():
            want = native(*other)
    except Exception:
        return None  # a dtype, say, that the host has no code for
    found = _difference("value", _floats(got), _floats(want))
    if found or not mine or not torch.is_grad_enabled() or _is_without_edges(args):
        return found
    return _gradients(_floats(got), _floats(want), mine, theirs)


def _is_without_edges(args: tuple) -> bool:
    """Whether no message is sent. DGL then sends the gradient of a maximum, which is 0 here, to row
    0."""
    from dgl import DGLGraph
    from dgl.heterograph_index import HeteroGraphIndex

    graphs = [a._graph if isinstance(a, DGLGraph) else a for a in args
              if isinstance(a, (DGLGraph, HeteroGraphIndex))]
    return any(not any(g.num_edges(etype) for etype in range(g.number_of_etypes())) for g in graphs)


def _gradients(got: list, want: list, mine: list, theirs: list) -> list[str]:
    # DGL sends the gradient of a maximum of nothing, which is infinite, to row 0; whoever uses it
    # masks it
    pairs = [(a, b, torch.randn(b.shape, dtype=torch.float64).to(b.dtype) * torch.isfinite(b))
             for a, b in zip(got, want)
             if a.requires_grad and b.requires_grad]
    if not pairs:
        return []
    ours = torch.autograd.grad([a for a, _, _ in pairs], mine,
                               [c.to(a.device, a.dtype) for a, _, c in pairs], allow_unused=True)
    with gnnaccel.disabled():
        native = torch.autograd.grad([b for _, b, _ in pairs], theirs, [c for _, _, c in pairs],
                                     allow_unused=True)
    return _difference("gradient", [_or_zero(g, t) for g, t in zip(ours, mine)],
                       [_or_zero(g, t) for g, t in zip(native, theirs)])


def _or_zero(gradient: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if gradient is None else gradient


def _floats(result: Any) -> list[Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]


def _difference(what: str, got: list[Tensor], want: list[Tensor]) -> list[str]:
    if len(got) != len(want):
        return [f"{len(got)} tensors, natively {len(want)}"]
    found = []
    for number, (a, b) in enumerate(zip(got, want)):
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(
                f"{what} {number} is {a.dtype} {list(a.shape)}, natively {b.dtype} {list(b.shape)}")
        elif b.numel():
            a, b = a.detach().cpu().double(), b.detach().cpu().double()
            finite = torch.isfinite(b)
            if not torch.equal(torch.isfinite(a), finite):
                found.append(f"{what} {number} is finite in other places than natively")
                continue
            a, b = a[finite], b[finite]
            off = float((a - b).abs().max()) if b.numel() else 0.0
            scale = max(float(b.abs().max()) if b.numel() else 0.0, 1.0)
            if off > _TOLERANCE.get(got[number].dtype, 1e-4) * scale:
                found.append(f"{what} {number} differs by {off:.3g} of {scale:.3g}")
    return found


def _copied(args: tuple, kwargs: dict, to_host: bool) -> tuple[tuple, list[Tensor]]:
    """The same operands as leaves of their own, on the host if ``to_host``; and those that want
    gradients."""
    leaves: list[Tensor] = []
    seen: dict[int, Any] = {}

    def one(value: Any) -> Any:
        if id(value) not in seen:
            seen[id(value)] = value, _copy(value, to_host, leaves)
        return seen[id(value)][1]

    return tree_map(one, (args, dict(kwargs))), leaves


def _copy(value: Any, to_host: bool, leaves: list[Tensor]) -> Any:
    from dgl import DGLGraph
    from dgl.heterograph_index import HeteroGraphIndex

    if isinstance(value, Tensor):
        found = (value.detach().cpu()
                 if to_host else value.detach()).clone().requires_grad_(value.requires_grad)
        leaves += [found] if value.requires_grad else []
        return found
    if isinstance(value, torch.nn.Module):
        found = copy.deepcopy(value)
        found = found.cpu() if to_host else found
        leaves += [p for p in found.parameters() if p.requires_grad]
        return found
    if to_host and isinstance(value, DGLGraph):
        return value.to("cpu")
    if to_host and isinstance(value, HeteroGraphIndex):
        from gnnaccel.adapters.dgl.bridge.tags import on_host

        return value.copy_to(on_host())
    return value


def _shapes(args: tuple, kwargs: dict) -> str:
    leaves = tree_leaves((args, kwargs))
    return f"({', '.join(str(list(v.shape)) if isinstance(v, Tensor) else v for v in leaves if isinstance(v, (Tensor, str)))})"
