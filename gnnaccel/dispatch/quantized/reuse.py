"""Stored rows that one primitive leaves for the next: Tango's reuse of quantized tensors and scales
between primitives.

A layer that sums over neighbours and maps the same features (SAGEConv, GraphConv) stores them once
for both; a map whose result is gathered next (GCNConv) gives it as stored rows too; two maps whose
results are added get the same gradient, and round it once. A function that stores rows offers them
with the tensor that they stand for; the next that needs them takes them, once. Only this very
tensor at the same version counts, on the same stream, and nothing is kept beyond its life or the
two newest offers, nor while a CUDA graph is captured, which would replay the use without the
storing.
"""
from __future__ import annotations

import threading
import weakref

from torch import Tensor

from gnnaccel.cuda.int8.quantize import Int8Rows
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph.tensor_ref import TensorRef
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.quantized.settings import Entry

_KEPT = 2
_local = threading.local()


def offer(x: Tensor, stored: Int8Rows | Entry) -> None:
    """Leave the rows that ``x`` [rows, channels] became; or the entry of the map that made it, to
    learn who takes the result."""
    if x.is_inference() or settings.captured(x.device):
        return
    offers = _local.__dict__.setdefault("offers", [])

    def forget(ref: weakref.ref) -> None:
        offers[:] = [entry for entry in offers if entry[0] is not ref]

    offers.append((TensorRef(x, forget), capture.stream(x.device), stored))
    del offers[:-_KEPT]


def take(x: Tensor) -> Int8Rows | Entry | None:
    """Stored rows or the entry that were offered with ``x``, if the offer holds."""
    offers = _local.__dict__.get("offers")
    if not offers or x.is_inference() or settings.captured(x.device):
        return None
    for i, (ref, stream, stored) in enumerate(offers):
        if ref() is x:
            del offers[i]
            return stored if ref.unmoved(x) and stream == capture.stream(x.device) else None
    return None


def rows_of(x: Tensor) -> Int8Rows | None:
    """The rows that ``x`` became, if they were offered."""
    stored = take(x)
    return stored if type(stored) is Int8Rows else None


def forget() -> None:
    """Drop this thread's offers."""
    _local.__dict__.clear()
