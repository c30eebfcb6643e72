"""A CUDA device for tests that lies on the CPU: tensors that say they are on ``cuda:0``, and refuse
to meet those on the host.

So code that only moves and labels can be run without a GPU. Kernels cannot: whatever asks for CuPy
finds none. Transfers are counted.
"""
from __future__ import annotations

import contextlib
from collections import Counter

import torch
# torch imports it at some first use, which must not happen under the simulation
import torch.distributed.tensor
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
transfers: Counter = Counter()  # "to device", "to host"
# ids out of range, which on a GPU end in a device assert that no handler survives
asserts: list[str] = []
recorded: list[Tensor] = []  # tensors of which a stream was recorded
waited: list = []  # pairs of streams, of which the first waits for the second
on: list = []  # streams whose blocks are open
active = False  # whether a test runs on it

# what CUDA has for tensors of both sides
_ACROSS = {"aten::copy_", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"}


class OnDevice(Tensor):
    """Shares the storage of ``inner``, a plain tensor, and says that it is on the device."""

    @staticmethod
    def __new__(cls, inner: Tensor):
        found = torch.Tensor._make_subclass(cls, inner, inner.requires_grad)
        found.inner = inner
        return found

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def record_stream(self, stream):
        recorded.append(self)

    def __repr__(self):
        return f"OnDevice({self.inner!r})"

    def __reduce_ex__(self, protocol):
        return OnDevice, (self.detach().inner,)

    def __deepcopy__(self, memo):
        found = OnDevice(self.detach().inner.clone()).requires_grad_(self.requires_grad)
        found.__dict__.update({k: v for k, v in self.__dict__.items() if k != "inner"})
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func._schema.name + (f".{func._schema.overload_name}"
                                    if func._schema.overload_name else "")
        if name not in _ACROSS and any(not isinstance(t, OnDevice) and t.dim() for t in tensors):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        if name == "aten::_local_scalar_dense":
            transfers["to host"] += 1
        outer = {id(t.inner): t for t in tensors if isinstance(t, OnDevice)}
        try:
            out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        except (IndexError, RuntimeError) as error:
            if "out of range" in str(error) or "out of bounds" in str(error):
                asserts.append(f"{name}: {error}")
            raise
        if name == "aten::copy_" and not isinstance(args[0], OnDevice):
            return out

        def placed(value):
            return (outer[id(value)] if id(value) in outer else OnDevice(value)
                    if isinstance(value, Tensor) else value)

        return tree_map(placed, out)


def _inner(value):
    return value.inner if isinstance(value, OnDevice) else value


class _Stream:
    """A stream, or an event on one, where everything happens in order."""

    cuda_stream = 7

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    wait = synchronize = wait_event = record

    def wait_stream(self, stream):
        waited.append((self, stream))

    def record_event(self):
        return _Stream()


DEFAULT = _Stream()


class _On(contextlib.nullcontext):
    """A block on a device."""


@contextlib.contextmanager
def _on(stream):
    """A block whose work goes to ``stream``."""
    on.append(stream)
    yield
    on.pop()


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        transfers["to device"] += 1
        return OnDevice(x.detach().clone())

    @staticmethod
    def backward(ctx, grad):
        return _inner(grad)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        transfers["to host"] += 1
        return x.inner.detach().clone()

    @staticmethod
    def backward(ctx, grad):
        return OnDevice(grad)


def _is_ours(device) -> bool:
    return (device is not None and not isinstance(device, (torch.dtype, Tensor))
            and torch.device(device).type == "cuda")


def _moved(x: Tensor, ours: bool) -> Tensor:
    if isinstance(x, OnDevice) == ours:
        return x
    return (_ToDevice if ours else _ToHost).apply(x)


class _Mode(TorchFunctionMode):
    """Sends what names a CUDA device to the simulated one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.cpu):
            return _moved(args[0], func is Tensor.cuda)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.numpy and isinstance(args[0], OnDevice):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is Tensor.tolist and isinstance(args[0], OnDevice):
            return _moved(args[0].detach(), False).tolist()
        # asks for its classes by the tensor's own key
        if func is torch.nn.functional.one_hot and isinstance(args[0], OnDevice):
            return OnDevice(func(_inner(args[0]), *args[1:], **kwargs))
        # makes its tensors without the dispatcher
        if func is Tensor.new and isinstance(args[0], OnDevice):
            return OnDevice(_inner(args[0]).new(*args[1:], **kwargs))
        kwargs.pop("pin_memory", None)  # which asks for a GPU
        if _is_ours(kwargs.get("device")):
            del kwargs["device"]
            if func in (torch.as_tensor, torch.tensor) and isinstance(args[0], OnDevice):
                return args[0].to(kwargs.get("dtype") or args[0].dtype)
            if func is torch.as_tensor:
                return _moved(torch.as_tensor(*args, **kwargs), True)
            # made there
            return tree_map(lambda t: OnDevice(t) if isinstance(t, Tensor) else t,
                            func(*args, **kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def _to(x, *args, **kwargs):
        like = next((a for a in args if isinstance(a, Tensor)), None)
        dtype = kwargs.get("dtype") or next((a for a in args if isinstance(a, torch.dtype)), None)
        device = (kwargs.get("device")
                  or next((a for a in args if isinstance(a, (str, torch.device))), None))
        if like is not None:
            device, dtype = like.device, like.dtype
        if device is not None:
            x = _moved(x, _is_ours(device))
        return x if dtype is None else x.type(dtype)


def _simulating(entry):
    """The function that DGL's loader runs in a thread; modes of torch are a thread's own."""
    def in_thread(*args):
        with _Mode():
            entry(*args)

    return in_thread


@contextlib.contextmanager
def device(monkeypatch):
    """From here on torch has the simulated device."""
    from dgl.dataloading import dataloader

    from gnnaccel.adapters import guards
    from gnnaccel.adapters.dgl import bridge

    for name, value in (("current_device", lambda: 0), ("set_device", lambda index: None),
                        ("Event", _Stream), ("Stream", _Stream), ("current_stream", _Stream),
                        ("set_stream", lambda stream: None), ("stream", _on),
                        ("default_stream", lambda place: DEFAULT), ("device", _On)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(dataloader, "_prefetcher_entry", _simulating(dataloader._prefetcher_entry))
    monkeypatch.setattr(bridge, "has_accelerator", lambda: True)
    monkeypatch.setattr(guards, "PASSIVE_MODES", {*guards.PASSIVE_MODES, _Mode})
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    transfers.clear()
    asserts.clear()
    recorded.clear()
    waited.clear()
    monkeypatch.setitem(globals(), "active", True)
    try:
        with _Mode():
            yield DEVICE
    finally:
        monkeypatch.setitem(globals(), "active", False)
        torch.__future__.set_overwrite_module_params_on_conversion(before)
