"""The layers inside a HeteroGraphConv, seen as one relational layer."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import alike
from gnnaccel.adapters.alike import Parameters
from gnnaccel.adapters.guards import any_global_hook, has_hooks, plain
from gnnaccel.adapters.own import path_of
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.policy.reasons import Reason, reason

_NORMS = {"right": True, "none": False}  # of GraphConv: whether its sums are means


class Inner(NamedTuple):
    """Alike layers, one for each relation: the mean (or sum) of neighbours' rows times the weights,
    plus bias and root term.

    Weights are [in, out], or [out, in] where ``transposed``.
    """

    parameters: Parameters
    transposed: bool
    mean: bool


def look_through(convs: Sequence[Any]) -> Inner | Reason:
    """The layers of the relations of a call, or why they cannot run as one."""
    cls = type(convs[0])
    if cls not in _classes():
        return reason("GA208", f"one of the layers is a {cls.__name__}",
                      "layers that run together: GraphConv, SAGEConv")
    why = path_of(cls, ("forward",)).why
    if why is not None:
        return why
    for conv in convs:
        if type(conv) is not cls:
            return reason("GA208", f"the layers are of {cls.__name__} and {type(conv).__name__}")
        why = _module_reason(conv) or _classes()[cls][0](conv)
        if why is not None:
            return why
    return _classes()[cls][1](convs)


def _module_reason(conv: Any) -> Reason | None:
    config = current()  # none where a call is only explained
    verdict = rules.INSIDE if config is None else rules.verdict(conv, config)
    # not listed is not excluded: the layer around it is in
    if not verdict.inside and verdict.reason.code != "GA102":  # type: ignore[union-attr]
        return verdict.reason
    if has_hooks(conv) or any_global_hook():
        return reason("GA501", "one of the layers has hooks")
    if "forward" in conv.__dict__:
        return reason("GA205", "forward is replaced on one of the layers")
    return None


# --- classes of layers ----------------------------------------------------------------------------

def _graph_conv_reason(conv: Any) -> Reason | None:
    if conv._norm not in _NORMS:
        return reason("GA208", f"norm={conv._norm!r}", "use norm='right' or norm='none'")
    if conv._activation is not None:
        return reason("GA208", "the layers have activations", "apply one to the result")
    if conv.weight is None:
        return reason("GA208", "the layers have no weights")
    if not conv._allow_zero_in_degree:
        return reason("GA208", "allow_zero_in_degree is off for one of the layers")
    return None


def _of_graph_convs(convs: Sequence[Any]) -> Inner | Reason:
    if len({conv._norm for conv in convs}) > 1 or len({conv.bias is None for conv in convs}) > 1:
        return reason("GA208", "the layers' options differ")
    biases = None if convs[0].bias is None else [conv.bias for conv in convs]
    return _checked(Inner(Parameters([conv.weight for conv in convs], biases, None), False,
                          _NORMS[convs[0]._norm]))


def _sage_conv_reason(conv: Any) -> Reason | None:
    if conv._aggre_type != "mean":
        return reason("GA208", f"aggregator_type={conv._aggre_type!r}",
                      "use aggregator_type='mean'")
    if conv.activation is not None or conv.norm is not None:
        return reason("GA208", "the layers have activations or norms", "apply them to the result")
    drop = conv.feat_drop
    if not plain(drop, torch.nn.Dropout) or (drop.p > 0 and drop.training):
        return reason("GA208", "the layers drop features", "drop them before the call")
    for name in ("fc_neigh", "fc_self"):
        if not plain(conv._modules[name], torch.nn.Linear):
            return reason("GA208",
                          f"{name} is no plain Linear: a "
                          f"{type(conv._modules[name]).__name__}, perhaps with hooks or a "
                          "weight of another type")
    return None


def _of_sage_convs(convs: Sequence[Any]) -> Inner | Reason:
    if (len({conv.fc_self.bias is None for conv in convs}) > 1
        or any(conv.fc_neigh.bias is not None for conv in convs)):
        return reason("GA208", "the layers' options differ")
    biases = None if convs[0].fc_self.bias is None else [conv.fc_self.bias for conv in convs]
    weights, roots = [conv.fc_neigh.weight
                      for conv in convs], [conv.fc_self.weight for conv in convs]
    return _checked(Inner(Parameters(weights, biases, roots), True, True))


def _checked(found: Inner) -> Inner | Reason:
    """These parameters, or why they cannot run together: not plain tensors of one dtype on one
    device, nor of shapes that fit together."""
    tensors = list(chain(*filter(None, found.parameters)))
    if not {type(t) for t in tensors} <= {Tensor, torch.nn.Parameter}:
        return reason("GA208", "some weights are no plain tensors")
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        return reason("GA203", "the weights differ in dtype or device")
    return alike.shapes_reason(found.parameters, found.transposed) or found


@functools.cache
def _classes() -> dict[type, tuple]:
    from dgl.nn.pytorch import GraphConv, SAGEConv

    return {GraphConv: (_graph_conv_reason, _of_graph_convs),
            SAGEConv: (_sage_conv_reason, _of_sage_convs)}
