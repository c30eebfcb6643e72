"""GCN's normalisation, added self loops and the like, which layers derive from the graph alone at
every call, as `kept_results`.

Being the same tensors each time, they find the structure that was built for them. PyG's modules
import these functions from each other by name, so every such name is replaced. Over weights
`weighted_norm` computes GCN's normalisation; elsewhere the host's function runs, and `graph_loops`
hands it the edges.
"""
from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, compiler
from torch.compiler import is_dynamo_compiling

from gnnaccel.adapters import own
from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.propagate import graph_loops, kept_results, weighted_norm
from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.dispatch.graph.structure import check_ids
from gnnaccel.dispatch.policy.config import current, silenced
from gnnaccel.dispatch.uncompiled import uncompiled

_drivers = driver.in_place
_CONV = "torch_geometric.nn.conv."
#: functions that layers call at every forward, or that their normalisations call where these depend
#: on weights, by module
_LOOPS = {_CONV + "cluster_gcn_conv": ("remove_self_loops", "add_self_loops"),
          _CONV + "eg_conv": ("add_remaining_self_loops",),
          _CONV + "simple_conv": ("add_self_loops",),
          _CONV + "gcn_conv": ("add_remaining_self_loops",),
          "torch_geometric.utils.laplacian": ("remove_self_loops", "add_self_loops")}


def install(patches: PatchSet) -> None:
    """Replace the functions through ``patches``.

    GCN's is replaced wherever a module of PyG has it, others where `_LOOPS` says. The results of
    PyG's transform are not kept: they belong to the user, who may write to them unseen.
    """
    native = importlib.import_module(_CONV + "gcn_conv").gcn_norm
    # a function that a user put there is left alone: it may do anything
    original = own.is_function(native, "torch_geometric", "gcn_norm")
    ours = (kept_results.keeping(checking(native), captured=weighted_norm.captured,
                                 weighted=weighted_norm.over_kept_edges, weights=1)
            if original else native)
    modules = {id(m): m for name, m in list(sys.modules.items())
               if name.startswith("torch_geometric.") and hasattr(m, "__dict__")}
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if value is native is not ours:
                patches.set(module, name, ours,
                            "Computes GCN's normalisation once for each `edge_index`, for all "
                            "layers and calls, and checks the ids of nodes on a GPU.")
    for name, functions in _LOOPS.items():
        module = importlib.import_module(name)
        for function in filter(vars(module).__contains__, functions):  # versions differ
            original = getattr(module, function)
            if own.is_function(original, "torch_geometric", function):
                # a function that a user put there is left alone: it may do anything
                patches.set(module, function, graph_loops.looping(original),
                            "Adds and removes self loops once for each `edge_index`, so that "
                            "layers find the same tensor again, and with it the structure "
                            "built for it.")
    transform = importlib.import_module("torch_geometric.transforms.gcn_norm").GCNNorm
    patches.set(transform, "forward", kept_results.without(transform.forward),
                "Gives the transform's results to the user without keeping them, as the user may "
                "write to them.")
    cheb = importlib.import_module(_CONV + "cheb_conv").ChebConv
    original = cheb.__norm__
    if own.is_method(original, cheb, "__norm__", "torch_geometric"):
        patches.set(cheb, "__norm__", kept_results.keeping(original, method=True, weights=3),
                    "Computes the normalised Laplacian of `ChebConv` once for each `edge_index`.")


def checking(native: Callable) -> Callable:
    """``native``, `gcn_norm`, which raises GraphError for ids out of range.

    The host's function fails an assertion on the device then, which ends the process. The check
    waits once for each graph. After `TRIED` graphs that did not come again it would do so in each
    call: from then on the host's own assertion has to do.
    """

    @functools.wraps(native)
    def norm(edge_index: Any, edge_weight: Tensor | None = None, num_nodes: Any = None,
             *more: Any, **kwargs: Any) -> Any:
        tried = kept_results.unused[0] >= kept_results.TRIED
        if (not (is_dynamo_compiling() or compiler._is_compiling_flag)  # `is_compiling`
            and type(edge_index) is Tensor and (edge_index.is_cuda or _drivers)
            and not (tried and graph_loops.computing.now)
            and _to_be_checked(edge_index, num_nodes)):
            ids_checked = kept_results.find("ids", checked, (edge_index, num_nodes), {})
            if ids_checked is None and kept_results.unused[0] < kept_results.TRIED:
                checked(edge_index, num_nodes)
        return native(edge_index, edge_weight, num_nodes, *more, **kwargs)

    return norm


@uncompiled
def _to_be_checked(edge_index: Tensor, nodes: Any) -> bool:
    return (edge_index.layout is torch.strided and type(nodes) is int
            and (current() is not None or silenced())
            and not capture.capturing() and context_reason() is None
            and edge_index.shape[:1] == (2,))


@uncompiled
def checked(edge_index: Tensor, nodes: int) -> tuple:
    """Nothing; GraphError if ``edge_index`` names other than ``nodes`` nodes."""
    if edge_index.numel():
        low, high = torch.stack(torch.aminmax(edge_index)).tolist()
        if low < 0 or high >= nodes:
            check_ids(*edge_index, nodes, nodes)  # type: ignore[call-arg]  # two rows
    return ()
