"""Judging numbers, choosing devices, watching memory, threads: what tests of kernels and structures share."""
from __future__ import annotations

import contextlib
import inspect
import sys

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.runtime import nvrtc
from tests.emulation.guards import guarded

needs_nvrtc = pytest.mark.skipif(nvrtc.found_at() is None, reason=nvrtc.MISSING)

#: half an ulp, relative: what storing a result in this dtype may cost
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11,
            torch.bfloat16: 2.0**-8}
FLOOR = 2e-7


def on_devices(names: str, both: list, cuda: list = ()):
    """`pytest.mark.parametrize` over ``names`` and the device: ``both`` everywhere, ``cuda`` on
    GPUs only."""
    def cell(device, values, **more):
        values = values if isinstance(values, tuple) else (values,)
        return pytest.param(device, *values, id="-".join([device, *map(_label, values)]), **more)

    extra = [values for values in cuda if values not in both]
    cells = [cell("emulated", values) for values in both]
    cells += [cell("cuda", values, marks=pytest.mark.gpu) for values in [*both, *extra]]
    return pytest.mark.parametrize(["device", *names.split(",")], cells, indirect=["device"])


def _label(value) -> str:
    return str(value).removeprefix("torch.").replace(", ", "x").strip("()")


# ---- threads ----

@contextlib.contextmanager
def at_each_line(function, act):
    """A block in which ``act()`` is called before each line of ``function``, as another thread may
    come in."""
    code = inspect.unwrap(function).__code__

    def line(frame, event, arg):
        if event == "line":
            act()
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if frame.f_code is code else None)
    try:
        yield
    finally:
        sys.settrace(before)


# ---- numbers ----

def relative(got: Tensor, exact: Tensor) -> float:
    """The relative error in the L2 norm; the absolute one where ``exact`` is zero."""
    exact = exact.double()
    norm = exact.norm().item()
    return (got.double() - exact).norm().item() / (norm or 1.0)


def assert_accurate(name: str, got: Tensor, plain: Tensor, exact: Tensor, floor: float = FLOOR,
                    factor: float = 2.0) -> None:
    """``got`` is at most ``factor`` times as far from the fp64 result as ``plain``, the same in
    fp32 by torch, plus a floor."""
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    assert torch.isfinite(got).all(), f"{name}: {int((~torch.isfinite(got)).sum())} numbers of {got.numel()} are not finite"
    error, allowed = relative(got, exact), factor * relative(plain, exact) + floor
    assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells -0 from 0 and takes equal NaNs for equal."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.shape == b.shape and a.dtype == b.dtype
            and torch.equal(a.contiguous().view(whole), b.contiguous().view(whole)))


# ---- structure ----

class _Silence:
    words = None


def forget_report(rows) -> tuple[int, int]:
    """Puts ``rows`` back to before the device has reported on them. Returns the exact sizes, which
    are bounds from now on."""
    if rows.indptr.is_cuda:
        torch.cuda.synchronize()
    exact = rows.split.sizes()
    rows.split.report, rows.split._exact = _Silence(), None
    rows.launched = rows.bounded = None
    assert not rows.split.known
    return exact


# ---- memory ----

class Poison:
    """Makes torch's allocating functions give NaN (floats) and -1 (integers), on the CPU between
    guard zones."""

    def __init__(self, device: torch.device):
        self._on_cpu = device.type == "cpu"
        self._guards: list = []

    def install(self, monkeypatch) -> None:
        for name, fresh in (("empty", True), ("empty_like", True), ("zeros", False),
                            ("zeros_like", False)):
            monkeypatch.setattr(torch, name, self._wrapped(getattr(torch, name), fresh))

    def _wrapped(self, allocate, fresh: bool):
        def replacement(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if kwargs.get("pin_memory") or tensor.is_inference() or not tensor.is_contiguous():
                return tensor
            if fresh:
                tensor.detach().fill_(float("nan") if tensor.is_floating_point() else -1
                                      if tensor.dtype.is_signed else 255)
            return self.guard(tensor) if self._on_cpu else tensor

        return replacement

    def guard(self, tensor: Tensor) -> Tensor:
        """A copy between guard zones; on a GPU the tensor itself."""
        if not self._on_cpu or tensor.dtype == torch.bool:
            return tensor
        self._guards.append(guarded(tensor))
        inner = self._guards[-1].tensor
        # not a view of the zones for autograd, which treats views that Functions return in its own
        # way
        return inner.new_empty(0).set_(inner.untyped_storage(), inner.storage_offset(), inner.shape,
                                       inner.stride())

    def check(self) -> None:
        """AssertionError when a kernel wrote beside a tensor."""
        for zone in self._guards:
            zone.check()
