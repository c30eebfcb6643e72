"""Calls of the models that `to_hetero` and `to_hetero_with_bases` of `torch_geometric.nn` make:
`torch.fx.GraphModule`s.

Such a model is left as it is. The calling of GraphModules is replaced: one that has layers over
edge types runs code generated from a copy of its graph, in which each such layer is one call
(`to_hetero`, `basis`). So it does not matter when the model was made, copied or loaded.
"""
from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from gnnaccel.adapters import guards
from gnnaccel.adapters.captured import modules
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.fx import basis, layers, to_hetero, trim
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.memory import native_learning
from gnnaccel.dispatch.memory.layer_memory import MISSED, fast_path, memories
from gnnaccel.dispatch.observe.records import listening
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.policy.names import IdentityMap


class Code(NamedTuple):
    """The code that runs for a model. ``native``: the model's own code, weakly; ``forward``: ours
    in its place, None where there is nothing to replace; ``absent``: the arguments, by place and
    name, that have to be None for it."""

    native: weakref.ref
    forward: Callable | None = None
    absent: tuple[tuple[int, str], ...] = ()


_codes: IdentityMap[Code] = IdentityMap()


def install(patches: PatchSet) -> None:
    """Replace the calling of GraphModules through ``patches``. Versions of torch without the means
    for it run these models as they are written."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo import decorators
    from torch.fx import graph_module

    internals = (getattr(graph_module, "_WrappedCall", None), getattr(decorators, "skip", None),
                 getattr(eval_frame, "get_eval_frame_callback", None))
    if None not in internals:
        caller: Any
        skip: Any
        compiler: Any
        caller, skip, compiler = internals
        rules.register_class("torch_geometric.nn.to_hetero_with_bases_transformer.HeteroBasisConv")
        patches.set(
            caller, "__call__", skip(_calling(caller.__call__, compiler)),
            "Lets the models of PyG's `to_hetero` and `to_hetero_with_bases` run each layer "
            "for all edge types at once. They are `torch.fx.GraphModule`s, and their generated "
            "code calls a layer once for each edge type, so nothing smaller can be replaced.",
            active="At each call of a `GraphModule` while gnnaccel is enabled. A model without "
                   "PyG's layers over edge types runs its own code, as does every one under "
                   "`torch.compile`, tracing or an explanation, or with hooks.",
            cost="One to four microseconds per call of a `GraphModule`. The first call of each "
                 "also looks once at the modules that it contains.")


def _calling(native: Callable, compiler: Callable) -> Callable:
    """``native``, or our code in the model's place. Compilers skip it and go on to the model's own
    code; ``compiler()``: the one that follows the calls here."""

    @functools.wraps(native)
    def call(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        config = None if compiler() is not None or is_compiling() else current()
        if config is None or self.cls_call is not None:
            return native(self, obj, *args, **kwargs)
        its_own = functools.partial(native, self)
        if configs.capturing:  # no `Module.__call__` that would see to it may come
            return modules.outermost(functools.partial(_run, its_own), obj, args, kwargs)
        return _run(its_own, obj, *args, **kwargs)

    return call


def _run(native: Callable, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """The model by ``native``, its own code, or by ours in its place."""
    config = current()
    recorded = listening()
    if config is not None and id(obj) in memories.entries:
        out = fast_path(obj, None, native, args, kwargs, config)
        if out is not MISSED:
            return out
    code = _code_of(obj)
    if (config is None or code.forward is None or not _plain(obj, args, kwargs)
            or not _fits(code, args, kwargs)):
        return native(obj, *args, **kwargs)
    return (code.forward(obj, *args, **kwargs)
            if recorded else native_learning.watch(obj, code.forward, args, kwargs, config))


def _plain(model: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call does nothing but to run the model's code, on dictionaries."""
    return (not guards.has_hooks(model) and not guards.any_global_hook()
            and "forward" not in model.__dict__
            and guards.context_reason() is None
            and not state.each_layer()  # each gets its halo rows
            and all(value is None or isinstance(value, Mapping)
                    for value in (*args, *kwargs.values())))


def _fits(code: Code, args: tuple, kwargs: dict) -> bool:
    return all((args[at] if at < len(args) else kwargs.get(name)) is None
               for at, name in code.absent)


def _code_of(model: Any) -> Code:
    """The `Code` of a model, generated once for each version of its own code."""
    native = type(model).forward
    code = _codes.get(model)
    if code is None or code.native() is not native:
        code = _generated(model, weakref.ref(native))
        _codes.set(model, code)
    return code


def _generated(model: Any, native: weakref.ref) -> Code:
    if not any(map(layers.is_kind, model.modules())) or getattr(model, "_is_replica", False):
        return Code(native)
    if type(model.graph._codegen) is not torch.fx.graph.CodeGen:
        return Code(native)
    code = model.graph.python_code("self")
    if code.src != model.code or _steps(native()) != _steps(_function(code)):
        return Code(native)  # it was changed since, or a function of the user's runs instead
    graph = copy.deepcopy(model.graph)
    absent = trim.passed_through(graph, model)
    if absent is None:
        return Code(native)
    hetero_layers = layers.find(graph, model)
    if not hetero_layers and not basis.replace(graph, model):
        return Code(native)
    for layer in reversed(hetero_layers):  # the results of one may be the inputs of the next
        layers.replace(graph, layer, to_hetero.call_of(layer))
    names = [node.target for node in graph.nodes if node.op == "placeholder"]
    return Code(native, _compiled(graph), tuple((names.index(name), name) for name in absent))


def _compiled(graph: torch.fx.Graph) -> Callable:
    return _function(graph.python_code("self"))


def _function(code: Any) -> Callable:
    """The function of a graph's code."""
    namespace = dict(code.globals)
    exec(compile(code.src, "<gnnaccel: a model of to_hetero>", "exec"), namespace)
    return namespace["forward"]


def _steps(function: Any) -> tuple | None:
    """The parts by which a function's code differs from another's, wherever its text is from."""
    code = getattr(function, "__code__", None)
    return code and (code.co_code, code.co_names, code.co_varnames, code.co_consts)
