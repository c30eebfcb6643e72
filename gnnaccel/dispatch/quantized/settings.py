"""Settings of the format of a layer's rows: by `gnnaccel.quantize`, by the block, and by the
environment.

Settings are kept weakly by the layer object, as names are. So nothing is in its attributes, its
state_dict or a pickle, and a copy of a quantized model is an ordinary model until it is quantized
itself: an average of weights, or a teacher, stays fp32.

The first of these that says something decides:

1. fp32 in the block (``precision("fp32")``) or in the environment: nothing is quantized;
2. ``overrides`` of `gnnaccel.quantize`, the longest name first;
3. what keeps a layer fp32: ``filter_fn``, the layer before the softmax, layers of which nothing can
   be quantized;
4. the block's format (`gnnaccel.precision`);
5. the format given to `gnnaccel.quantize`;
6. ``GNNACCEL_PRECISION``.

A block or the environment asks for a format without saying for which model, whose last layer feeds
the softmax and stays fp32. So the layers that could be quantized are written down in the order in
which they are called; when one is called that is in the list already, a new pass has begun, and the
last of the list was the last of the pass. Until that is known nothing is quantized. Two models
called by turns look like one here: give each to `gnnaccel.quantize` instead.
"""
from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gnnaccel.dispatch.plan.compiling import PENDING
from gnnaccel.dispatch.policy import config, rules
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import rows
from gnnaccel.dispatch.quantized.guard import Guard, Watch

if TYPE_CHECKING:
    from gnnaccel.dispatch.quantized.rows import Storage

_log = logging.getLogger("gnnaccel")


@dataclass(frozen=True)
class Setting:
    """Setting of a layer by `gnnaccel.quantize`. ``why``: the reason for fp32, else None;
    ``named``: it was overridden by name; ``backward``: None for the format itself."""

    name: str
    format: str
    backward: str | None
    guard: Guard | None
    named: bool = False
    why: Reason | None = None


@dataclass
class Entry:
    """A layer's setting (None: only a block or the environment asks), the guard's checks, and
    counts of its calls.

    ``quantized``, ``in_fp32``: calls; ``reasons``: why calls ran in fp32, with counts; ``storage``:
    of the last quantized call; ``gain``: estimated time in fp32 over that, of such a call;
    ``measured``: likewise measured. ``maps``: linear maps inside the layer have entries of their
    own, which may use the rows that the layer stores.
    """

    name: str
    layer: str
    setting: Setting | None
    watch: Watch
    quantized: int = 0
    in_fp32: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    storage: Storage | None = None
    gain: float | None = None
    measured: float | None = None
    last: Reason | None = None
    maps: bool = False
    owner: weakref.ref | None = None  # of a linear map: the layer that it is in
    feeds: bool = False  # likewise: the layer gathers what it gives
    decided: tuple | None = None  # likewise: its last call's signature, and what was decided of it

    def fell_back(self, why: Reason) -> None:
        """Count a call in fp32; the first for each reason is logged."""
        self.in_fp32 += 1
        if why.code not in self.reasons:
            _log.info("%s runs in fp32: %s", self.name, why)
        self.reasons[why.code] = self.reasons.get(why.code, 0) + 1
        self.last = why


_entries: IdentityMap[Entry] = IdentityMap()
_maps: IdentityMap[Entry] = IdentityMap()  # entries of linear maps inside layers


def keep(layer: Any, setting: Setting) -> Entry:
    """Give ``layer`` a setting; the guard's checks under an earlier one are forgotten."""
    entry = Entry(setting.name, type(layer).__name__, setting, Watch(setting.guard, setting.name))
    _entries.set(layer, entry)
    return entry


def keep_map(linear: Any, layer: Any, setting: Setting) -> Entry:
    """Give a linear map inside ``layer`` a setting, as `keep`; the layer notes that it has maps."""
    record = Entry(setting.name, type(linear).__name__, setting, Watch(setting.guard, setting.name),
                   owner=weakref.ref(layer))
    _entries.get(layer).maps = True  # type: ignore[union-attr]
    _maps.set(linear, record)
    return record


def drop(layer: Any) -> bool:
    """Forget all about ``layer``, a layer of a graph or a linear map; whether there was a setting
    of the former."""
    if _maps.get(layer) is not None:
        del _maps.entries[id(layer)]
    record = _entries.get(layer)
    if record is not None:
        del _entries.entries[id(layer)]
    return record is not None and record.setting is not None


def entry(layer: Any) -> Entry | None:
    return _entries.get(layer)


def entries() -> list[Entry]:
    return _entries.values()


def map_entry(linear: Any) -> Entry | None:
    """Entry of a linear map inside a layer, or None."""
    return _maps.get(linear)


def maps_asked() -> bool:
    """Whether `gnnaccel.quantize` was told of any linear map that lives; blocks and the environment
    ask for none by themselves."""
    return bool(_maps.entries)


def map_entries() -> list[Entry]:
    return _maps.values()


def forget() -> None:
    """Drop every setting and all that is known of layers."""
    _entries.clear()
    _maps.clear()
    _kinds.clear()
    _passes.__dict__.clear()


def kept() -> tuple[dict, dict]:
    """Entries of layers and of maps: empty as long as nothing counts their calls."""
    return _entries.entries, _maps.entries


def asked(layer: Any, config: Config) -> Entry | None:
    """The layer's entry if anything asks for quantization here; None at once where nothing does."""
    record = _entries.get(layer) if _entries.entries else None
    if record is None and (config.block_precision or config.precision or "fp32") != "fp32":
        name = rules.qualified_name(layer) or type(layer).__name__
        record = Entry(name, type(layer).__name__, None, Watch(Guard(), name))
        _entries.set(layer, record)
    return record


def note_native(layer: Any, config: Config, why: Reason) -> None:
    """Count a call that runs natively before anybody could ask for its rows."""
    record = asked(layer, config)
    if record is not None:
        record.fell_back(reason("GA607", str(why)))


def native_again(layer: Any) -> None:
    """Count a call that runs natively as the last one did."""
    record = _entries.get(layer) if _entries.entries else None
    if record is not None and record.last is not None:
        record.fell_back(record.last)


def wanted(layer: Any, found: Entry, config: Config, checkpointed: bool) -> Storage | Reason:
    """The storage of this call, or why it is fp32."""
    form: str | None
    backward: str | None
    block, default, setting = config.block_precision, config.precision, found.setting
    if block == "fp32" or default == "fp32":
        return reason("GA601",
                      "fp32 was asked for "
                      + ("by precision('fp32')" if block == "fp32" else "by GNNACCEL_PRECISION"))
    if setting is not None and setting.why is not None:
        return setting.why
    if setting is not None:
        form = setting.format if setting.named else block or setting.format
        backward = setting.backward if form == setting.format else None
    else:
        form, backward = block or default, None
        if form is None:
            return reason("GA601", "nothing asks for another format here")
        why = reason_against(layer, checkpointed)
        if why is not None:
            return why
    if form == "fp32":
        return reason("GA601")
    if found.watch.failure is not None:
        return reason("GA605", found.watch.failure)
    if config.when == "profitable" and found.measured is not None and found.measured < 1:
        return reason("GA604", f"measured to be {found.measured:.2f} times as fast")
    return rows.Storage(form, backward or form)


def learning(use: Any) -> bool:
    """Whether the next call is to be decided anew: which layer comes last is not known yet; or the
    kernels are being compiled, for which a checkpoint waits, and others do not."""
    return type(use) is Reason and use.code in ("GA606", PENDING)


def captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# --- the last layer of a pass ---------------------------------------------------------------------

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
