"""Every call of a PyG layer while somebody else's tests run, repeated by the host's own code, in
fp32 and in fp64.

Before the call itself, which the test goes on with, the layer runs three times on copies of its
arguments and parameters: as gnnaccel decides it, natively, and natively in fp64. Outputs and the
gradients of everything that floats are judged by `gnnaccel.profile.judging`: at most twice the
host's error. Then the call's own result is judged too, so that what it remembers of the first ones
counts.

Modules are met where they are called, above whatever gnnaccel replaced, so nothing that it watches
is another's.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn import HeteroConv, HeteroDictLinear, HeteroLinear, MessagePassing
from torch_geometric.nn.aggr import Aggregation

from gnnaccel.adapters import guards
from gnnaccel.adapters.pyg.guards import HOOKS
from gnnaccel.dispatch.observe.watch import Visit
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.profile.judging import SECOND_LOOK, errors
from gnnaccel.profile.sides import EXACT, HOST, OURS, Results, Sides, named_tensors
from gnnaccel.profile.undisturbed import undisturbed

_LAYERS = (MessagePassing, Aggregation, HeteroConv, HeteroLinear, HeteroDictLinear)
# times what is allowed: the call itself is seen once, and the host's error in one draw is luck
_ONE_DRAW = 4.0
_busy = threading.local()


class Shadow:
    """``alarms``: what did not agree since the last `taken`; ``counts``: calls by what became of
    their comparison."""

    def __init__(self) -> None:
        self.alarms: list[str] = []
        self.counts: Counter[str] = Counter()

    def install(self) -> None:
        """Stand above the calling of modules, and of the GraphModules that `to_hetero` makes.
        gnnaccel is enabled by now."""
        from torch._dynamo import decorators
        from torch.fx import graph_module

        torch.nn.Module.__call__ = self._around(torch.nn.Module.__call__, 0)
        caller = graph_module._WrappedCall
        caller.__call__ = decorators.skip(self._around(caller.__call__, 1))

    def taken(self) -> list[str]:
        """The alarms, which are forgotten."""
        found, self.alarms = self.alarms, []
        return found

    def _around(self, native: Callable, place: int) -> Callable:
        """``native``; the module that it calls is its argument at ``place``."""

        @functools.wraps(native)
        def call(*args: Any, **kwargs: Any) -> Any:
            if (torch.compiler.is_compiling() or getattr(_busy, "now", False)
                or not _is_layer(args[place])):
                return native(*args, **kwargs)
            _busy.now = True
            try:
                return self._compared(functools.partial(native, *args[:place]), args[place],
                                      args[place + 1:], kwargs)
            finally:
                _busy.now = False

        return call

    def _compared(self, native: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
        why = _left_out(layer)
        if why is not None or configs.current() is None:
            self.counts[why or "disabled"] += 1
            return native(layer, *args, **kwargs)
        name, once = type(layer).__name__, None
        sides = _Sides(Visit(layer, None, native, args, kwargs, None),
                       not torch.is_inference_mode_enabled())
        try:
            once = self._look(name, sides)
        except _Unable as problem:
            self.counts[f"not compared: {problem}"] += 1
        out = native(layer, *args, **kwargs)
        if once is not None:
            self._judge(f"{name}, the call itself", lambda _: (_results(out), *map(_outputs, once)),
                        1)
        return out

    def _look(self, name: str, sides: _Sides) -> tuple[Results, Results] | None:
        """Compare; the host's results in the call's own mode and in fp64, None where random numbers
        make them useless."""
        ours = _tried(sides, OURS)
        # a bad index ends the host's use of the device
        if isinstance(ours, Exception) and sides.device.type == "cuda":
            self.counts["raises on the GPU"] += 1
            return None
        host = _tried(sides, HOST)
        if isinstance(host, Exception) or isinstance(ours, Exception):
            self._raised(name, ours, host, sides.ran)
            return None
        random = sides.drew()
        if random:
            sides.evaluate = True
            if isinstance(_tried(sides, HOST), Exception) or sides.drew():
                self.counts["not compared: draws random numbers"] += 1
                return None
        exact = _tried(sides, EXACT)
        if isinstance(exact, Exception):  # edge weights inside a sparse tensor, ids as floats
            self.counts["compared without fp64"] += 1

        def draw(seed: int) -> tuple[Results, Results, Results]:
            host = sides.once(HOST, seed)
            return (sides.once(OURS, seed), host,
                    host if isinstance(exact, Exception) else sides.once(EXACT, seed))

        self._judge(name, draw, SECOND_LOOK)
        return None if random else (host, host if isinstance(exact, Exception) else exact)

    def _judge(self, name: str, draw: Callable, looks: int) -> None:
        try:
            found = errors([draw(0)])
            if looks > 1 and not all(e.right for e in found):
                found = errors(map(draw, range(1, looks + 1)))
        # norms of sparse gradients and the like
        except (RuntimeError, NotImplementedError) as problem:
            raise _Unable(f"{type(problem).__name__} in judging") from problem
        factor = 1.0 if looks > 1 else _ONE_DRAW
        wrong = [f"{e.name}: {e}, the host's {e.host:.1e}" for e in found if e.text
                 or not e.ours <= factor * e.allowed]
        self.counts["wrong" if wrong else "same"] += 1
        if wrong:
            self.alarms.append(f"{name}: " + "; ".join(wrong[:4]))

    def _raised(self, name: str, ours: Any, host: Any, ran: bool) -> None:
        """``ran``: the host came as far as backward, as over a sparse matrix that is not square."""
        if type(ours) is type(host):
            self.counts["both raise"] += 1
        elif isinstance(ours, Exception) and isinstance(host, Exception):
            self.counts["both raise"] += 1
            if not isinstance(ours, type(host)):
                self.alarms.append(f"{name}: raises {ours!r:.200}, the host {host!r:.200}")
        elif ran and not isinstance(ours, Exception):
            self.counts["the host alone raises in backward"] += 1
        else:
            which, problem = (("gnnaccel", ours)
                              if isinstance(ours, Exception) else ("the host", host))
            self.alarms.append(f"{name}: only {which} raises {problem!r:.300}")


class _Unable(Exception):
    """The call cannot be repeated on the side."""


class _Sides(Sides):
    """``native`` of the visit calls the layer; under no configuration that is the host's own
    code."""

    evaluate = ran = False

    def __init__(self, visit: Visit, grad: bool):
        super().__init__(visit, None, grad)

    def once(self, side: str, seed: int = 0, upstream: list | None = None) -> Results:
        with undisturbed(self.visit.layer):
            if self.evaluate:
                self.visit.layer.eval()
            found = super().once(side, seed, upstream)
        return {name: _dense(t) for name, t in found.items()}

    def drew(self) -> bool:
        return self._drew

    def _run(self, side: str, args: tuple, kwargs: dict) -> Any:
        self.ran = False
        with contextlib.nullcontext() if side == OURS else configs.override(None):
            out = self.visit.native(self.visit.layer, *args, **kwargs)
        self._drew, self.ran = self._generators.moved(), True
        return out


def _tried(sides: _Sides, side: str) -> Results | Exception:
    try:
        return sides.once(side)
    except Exception as problem:  # it belongs to the comparison: does the other side raise it too?
        return problem


def _is_layer(module: Any) -> bool:
    if isinstance(module, torch.fx.GraphModule):
        return any(isinstance(part, MessagePassing) for part in module.modules())
    return isinstance(module, _LAYERS)


def _left_out(layer: Any) -> str | None:
    """Why the layer cannot run several times unnoticed."""
    if guards.context_reason() is not None:
        return "traced or transformed"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "captured"
    if any(isinstance(p, UninitializedParameter) for p in layer.parameters()):
        return "lazy"
    for module in layer.modules():
        own = module.__dict__
        if guards.has_hooks(module) or any(own.get(name) for name in HOOKS):
            return "hooks"
        if own.get("_explain"):
            return "explained"
    return None


def _results(out: Any) -> Results:
    return {name: _dense(t.detach()) for name, t in named_tensors(out, "out").items()}


def _dense(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.layout is torch.strided else tensor.to_dense()


def _outputs(results: Results) -> Results:
    return {name: t for name, t in results.items() if name.startswith("out")
            and isinstance(t, Tensor)}


