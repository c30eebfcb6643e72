"""The last layer of a pass, where no model was given: it feeds the softmax, and stays fp32.

A block or the environment asks for a format without saying for which model. So the layers that
could be quantized are written down in the order in which they are called; when one is called that
is in the list already, a new pass has begun, and the last of the list was the last of the pass.
Until that is known nothing is quantized. Two models called by turns look like one here: give each
to `gnnaccel.quantize` instead.
"""
from __future__ import annotations

import threading
import weakref
from typing import Any

from gnnaccel.dispatch.policy import config
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason, reason

_LAST, _INNER = "last", "inner"
_kinds: IdentityMap[str] = IdentityMap()
_passes = threading.local()


def reason_against(layer: Any, checkpointed: bool) -> Reason | None:
    """Why a layer that no model was given for stays fp32 in this call. ``checkpointed``: the call
    may be repeated, and must then find the same; nothing is learnt from it."""
    kind = _kinds.get(layer)
    if not checkpointed:
        kind = _note(layer, kind)
    if kind == _LAST:
        return reason("GA602")
    return None if kind == _INNER else reason("GA606")


def _note(layer: Any, kind: str | None) -> str | None:
    pass_ = _passes.__dict__.setdefault("layers", [])
    pass_[:] = [ref for ref in pass_ if ref() is not None]
    if any(ref() is layer for ref in pass_):
        _learn([ref() for ref in pass_])
        pass_.clear()
        kind = _kinds.get(layer)
    pass_.append(weakref.ref(layer))
    return kind


def _learn(layers: list[Any]) -> None:
    changed = False
    for i, layer in enumerate(layers):
        kind = _LAST if i == len(layers) - 1 or _kinds.get(layer) == _LAST else _INNER
        changed |= _kinds.get(layer) != kind
        _kinds.set(layer, kind)
    if changed:
        config.bump()


def forget() -> None:
    _kinds.clear()
    _passes.__dict__.clear()
