"""Bands one after the other: the next one's rows come, and the last one's results go, while one
computes."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Band = TypeVar("Band")


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """The streams of rows that come, and of rows that go."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def run(device: torch.device, bands: Sequence[Band], load: Callable[[Band], Any],
        compute: Callable[[Band, Any], Any], store: Callable[[Band, Any], None],
        tensors: Callable[[Any], Iterable[Tensor]]) -> None:
    """``store(band, compute(band, load(band)))`` for each band, in order.

    On a GPU ``load`` and ``store`` are work of two streams beside the current one. At most two
    bands have been loaded and not computed; the first is computed before the second is loaded, as
    it may tell which rows to load. A band's work is asked for while the one before it computes,
    so that the GPU does not wait for the host in between. At most two results wait to go.
    ``tensors``: of a result of ``load`` or ``compute``. Results are there when this returns.
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
    loading.wait_stream(main)
    try:
        _issued(main, loading, storing, bands, load, compute, store, tensors)
    finally:  # also after an error no copy may be under way to or from memory that is freed
        main.wait_stream(loading)
        main.wait_stream(storing)
        main.synchronize()


def _issued(main: Any, loading: Any, storing: Any, bands: Sequence[Band],
            load: Callable[[Band], Any], compute: Callable[[Band, Any], Any],
            store: Callable[[Band, Any], None], tensors: Callable[[Any], Iterable[Tensor]]) -> None:
    """Issue all bands' work, of which the last is not done when this returns."""
    def loaded(band: Band) -> tuple[Any, Any]:
        with torch.cuda.stream(loading):
            return load(band), loading.record_event()

    held = loaded(bands[0])
    computed: Any = None
    gone: list[Any] = [None, None]  # when the last two results have left
    for at, band in enumerate(bands):
        if at > 1:
            gone[0].synchronize()  # so that no third result waits to go while one is computed
        main.wait_event(held[1])
        _used(tensors(held[0]), main)
        result = compute(band, held[0])
        before, computed = computed, main.record_event()
        storing.wait_event(computed)
        with torch.cuda.stream(storing):
            store(band, result)
            gone = [gone[1], storing.record_event()]
        _used(tensors(result), storing)
        del result  # before another band's rows are asked for
        if at + 1 == len(bands):
            return
        if at:
            before.synchronize()  # its rows' memory is free, so that no third band's is asked for
        else:
            loading.wait_event(computed)  # the rows that the first band has fetched for all
        held = loaded(bands[at + 1])


@contextlib.contextmanager
def lasting(device: torch.device) -> Iterator[None]:
    """A block whose new tensors outlast a call. Their memory is of the stream that rows come by,
    where calls keep rows that all bands need: these take turns in the same memory. The current
    stream may write to them."""
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    loading, _ = _streams(current.device)
    with torch.cuda.stream(loading):
        yield
    current.wait_stream(loading)


def _used(tensors: Iterable[Tensor], stream: Any) -> None:
    """Note that ``stream`` uses tensors of another one: their memory is freed after that."""
    for t in tensors:
        t.record_stream(stream)
