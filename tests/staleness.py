"""What tests of repeated calls share: whether a call gives what the host gives, whatever changed
since the call before it."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gnnaccel
from tests.helpers import relative


def tensors(out: Any) -> list[Tensor]:
    if isinstance(out, dict):
        return [t for key in sorted(out) for t in tensors(out[key])]
    return ([t for one in out for t in tensors(one)] if isinstance(out, (tuple, list)) else [out]
            if isinstance(out, Tensor) else [])


def results(layer, args, kwargs) -> list[Tensor | None]:
    """The outputs, and all gradients."""
    leaves = [t for t in tensors([list(args), list(kwargs.values())]) if t.is_floating_point()]
    for t in (*leaves, *layer.parameters()):
        t.requires_grad_()
        t.grad = None
    torch.manual_seed(7)
    outs = tensors(layer(*args, **kwargs))
    if torch.is_grad_enabled():
        sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape).to(t) / t.numel()).sum()
            for t in outs).backward()
    return [t.detach().clone() for t in outs] + [None if t.grad is None else t.grad.clone()
                                                 for t in (*leaves, *layer.parameters())]


def as_native(layer, args, tolerance: float = 2e-4, **kwargs) -> None:
    """The call, twice, gives what the host gives; what is remembered is looked for, not digits."""
    with gnnaccel.disabled():
        expected = results(layer, args, kwargs)
    scale = max((t.abs().max().item() for t in expected if t is not None and t.numel()),
                default=1.0)
    for _ in range(2):
        got = results(layer, args, kwargs)
        for a, b in zip(got, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b.numel():
                assert a.shape == b.shape and a.dtype == b.dtype
                assert relative(a, b) < tolerance or (a - b).abs().max().item() < tolerance * scale * 0.05


def exchanged(args: Any, others: Any) -> Any:
    """``args`` with the floating tensors of ``others``."""
    if isinstance(args, dict):
        return {key: exchanged(value, others[key]) for key, value in args.items()}
    if isinstance(args, tuple):
        return tuple(exchanged(*both) for both in zip(args, others))
    return others.detach() if isinstance(args, Tensor) and args.is_floating_point() else args


def replaced(args: Any, old: Tensor, new: Tensor) -> Any:
    if isinstance(args, dict):
        return {key: replaced(value, old, new) for key, value in args.items()}
    if isinstance(args, tuple):
        return tuple(replaced(value, old, new) for value in args)
    return new if args is old else args


def refused(layer, args) -> None:
    """The call raises what the host's own raises, if it does."""
    error = None
    with gnnaccel.disabled():
        try:
            expected = tensors(layer(*args))
        except Exception as found:  # of the host's own kinds
            error = type(found)
    if error is not None:
        with pytest.raises(error):
            layer(*args)
    else:
        assert all(a.dtype == b.dtype and relative(a, b) < 1e-5
                   for a, b in zip(tensors(layer(*args)), expected, strict=True))


def doubled(module, given, out):
    return {key: t * 2 for key, t in out.items()} if isinstance(out, dict) else out * 2


def watch_each_module(layer, args) -> None:
    """A hook on each module inside, one after the other."""
    for part in [part for part in layer.modules() if part is not layer]:
        with_hook = part.register_forward_hook(doubled)
        as_native(layer, args)
        with_hook.remove()
        as_native(layer, args)


def replace_each_forward(layer, args, monkeypatch) -> None:
    """Another forward on each module inside, then on each of their classes."""
    inside = [part for part in layer.modules() if part is not layer]
    for part in inside:
        own = type(part).forward
        part.forward = lambda *args, part=part, own=own, **kwargs: doubled(
            None, None, own(part, *args, **kwargs))
        as_native(layer, args)
        del part.forward
        as_native(layer, args)
    for cls in {type(part) for part in inside if "forward" in vars(type(part))}:
        with monkeypatch.context() as patch:
            own = cls.forward
            patch.setattr(cls, "forward", lambda *args, own=own, **kwargs: doubled(
                None, None, own(*args, **kwargs)))
            as_native(layer, args)
        as_native(layer, args)
