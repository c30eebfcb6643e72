"""Shorter ways for questions that PyG's own code asks anew in each call though the answer is known
or nearer at hand.

Over small graphs a layer is bound by such steps, and native calls save them as well as others. A
module that PyG writes meanwhile, for a class that is first instantiated, goes on asking torch
whether something compiles.
"""
from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from gnnaccel.adapters import own
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.propagate import kept_results

_MANY = 4096
_unused = [0]  # turned edges kept since some were used again, as of `kept_results.find`


def install(patches: PatchSet) -> None:
    """Replace the functions through ``patches``; none that this version does not have."""
    from torch_geometric import nn, typing
    from torch_geometric.nn.module_dict import ModuleDict

    translate = vars(ModuleDict).get("to_external_key")
    if (isinstance(translate, classmethod)
        and own.is_method(translate, ModuleDict, "to_external_key", "torch_geometric")):
        patches.set(ModuleDict, "to_external_key", classmethod(remembering(translate.__func__)),
                    "Remembers the name that a key of a `ModuleDict` stands for: `HeteroConv` asks "
                    "for it once per edge type and call.")
    directed = getattr(nn, "DirGNNConv", None)  # versions differ
    if (directed is not None
        and own.is_method(directed.forward, directed, "forward", "torch_geometric")
        and tuple(inspect.signature(directed.forward).parameters) == ("self", "x", "edge_index")):
        patches.set(directed, "forward", _both_ways(directed.forward),
                    "Turns edges around once for each `edge_index`, so that the layer against the "
                    "edges' direction finds the same tensor again, and with it the structure "
                    "built for it.")
    if getattr(typing, "WITH_PT23", False):
        # PyG's function, which asks torch's, seven times a layer
        native = importlib.import_module("torch_geometric._compile").is_compiling
        for name, module in list(sys.modules.items()):
            if name.startswith("torch_geometric.") or name == "torch_geometric":
                if getattr(module, "__dict__", {}).get("is_compiling") is native:
                    patches.set(module, "is_compiling", is_compiling,
                                "Asks torch directly whether it compiles, without PyG's function "
                                "in between; a layer asks up to seven times per call.")


def _both_ways(native: Callable) -> Callable:
    """`DirGNNConv`'s forward (arXiv 2305.10498) with the turned edges of before."""

    @functools.wraps(native)
    def forward(self: Any, x: Any, edge_index: Any) -> Any:
        if is_compiling():
            return native(self, x, edge_index)
        along = self.conv_in(x, edge_index)  # first: it may write to the edges
        turned = kept_results.find("turned", _turned, (edge_index,), {}, unused=_unused)
        against = self.conv_out(x, edge_index.flip([0]) if turned is None else turned[0])
        out = self.alpha * against + (1 - self.alpha) * along
        return out + self.lin(x) if self.root_weight else out

    return forward


def _turned(edge_index: Tensor) -> tuple[Tensor]:
    return (edge_index.flip([0]),)


def remembering(native: Callable) -> Callable:
    """``native(cls, key)``, a function of nothing else, with its results kept. `HeteroConv` goes
    through its layers by edge type in every call, and for each type PyG compares the key with the
    names of all attributes of the class."""
    names: dict[tuple[type, str], Any] = {}

    @functools.wraps(native)
    def translated(cls: type, key: str) -> Any:
        if is_compiling() or type(key) is not str:
            return native(cls, key)
        name = names.get((cls, key))
        if name is None:
            if len(names) >= _MANY:
                names.clear()
            name = names[cls, key] = native(cls, key)
        return name

    return translated
