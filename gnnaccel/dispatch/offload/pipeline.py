"""Bands one after the other: the next one's rows come, and the last one's results go, while one
computes."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Band = TypeVar("Band")


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Those that rows come and go by."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def run(device: torch.device, bands: Sequence[Band], load: Callable[[Band], Any],
        compute: Callable[[Band, Any], Any], store: Callable[[Band, Any], None],
        tensors: Callable[[Any], Iterable[Tensor]]) -> None:
    """``store(band, compute(band, load(band)))`` for each band, in order.

    On a GPU ``load`` and ``store`` are work of two streams beside the current one. At most two
    bands have been loaded and not computed; the first is computed before the second is loaded, as
    it may tell what there is to load. ``tensors``: those in what ``load`` and ``compute`` return.
    Results are there when this returns.
    """
    if device.type == "cuda":
        _overlapped(device, bands, load, compute, store, tensors)
        return
    for band in bands:
        store(band, compute(band, load(band)))


def _overlapped(device: torch.device, bands: Sequence[Band], load: Callable[[Band], Any],
                compute: Callable[[Band, Any], Any], store: Callable[[Band, Any], None],
                tensors: Callable[[Any], Iterable[Tensor]]) -> None:
    main = torch.cuda.current_stream(device)
    loading, storing = _streams(main.device)

    def loaded(band: Band) -> tuple[Any, Any]:
        with torch.cuda.stream(loading):
            return load(band), loading.record_event()

    loading.wait_stream(main)
    held = loaded(bands[0])
    computed: Any = None
    for at, band in enumerate(bands):
        ahead: Any = None
        if at and at + 1 < len(bands):
            computed.synchronize()  # its rows' memory is free, so that no third band's is asked for
            ahead = loaded(bands[at + 1])
        main.wait_event(held[1])
        _used(tensors(held[0]), main)
        result = compute(band, held[0])
        computed = main.record_event()
        storing.wait_event(computed)
        with torch.cuda.stream(storing):
            store(band, result)
        _used(tensors(result), storing)
        del result  # before another band's rows are asked for
        if ahead is None and at + 1 < len(bands):
            loading.wait_event(computed)  # what the first band has fetched for all
            ahead = loaded(bands[at + 1])
        held = ahead
    main.wait_stream(storing)
    main.synchronize()


def _used(tensors: Iterable[Tensor], stream: Any) -> None:
    """Tensors of another stream are used by this one: their memory is free after that."""
    for t in tensors:
        t.record_stream(stream)
