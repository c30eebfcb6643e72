"""An operation's way: what speaks for and against kernels, torch operations and the host's own
code; the run; the record.

On a CPU the host's own kernels are good, so they run. Where the host has none, on a GPU with a
wheel built without CUDA, torch operations are the last resort.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.dispatch import counters, records, router, watch
from gnnaccel.dispatch.config import Config
from gnnaccel.dispatch.graph import kernels_run_on
from gnnaccel.dispatch.ops.call import Kernel, OpCall, compile_reason
from gnnaccel.dispatch.reasons import Reason, reason

Rejected = tuple[tuple[str, Reason], ...]
_KERNELS, _TORCH = "kernels", "torch operations"


class Choice(NamedTuple):
    """``route``: "cuda", "torch" or "native"; ``rejected``: (candidate, reason) pairs."""

    route: str
    rejected: Rejected


def on_cpu_native(name: str, config: Config) -> bool:
    """Whether a call with tensors on the CPU may go native without a further look; counts it
    then."""
    if config.when != "profitable" or records.listening():
        return False
    counters.again(name, "GA401")
    return True


def run(name: str, call: OpCall | Reason, native: Callable[[], Any] | None,
        config: Config | None) -> Any:
    """Run a call of the operation ``name`` on the best route.

    ``call``: a Reason where it was not understood; ``native``: the host's own code, None where that
    cannot run; then a Reason must not come here. ``config`` None (disabled here): without a word,
    and not by kernels.
    """
    if config is not None and records.listening():
        return watch.around(watch.Visit(name, None, native, (call,), {}, config), _told)
    return _run(name, call, native, config, 0)


def _told(visit: watch.Visit) -> Any:
    """The same, with a record."""
    return _run(visit.layer, visit.args[0], visit.native, visit.config, time.perf_counter_ns())


def _run(name: str, call: OpCall | Reason, native: Callable[[], Any] | None, config: Config | None,
         start: int) -> Any:
    """``start``: when the call began, 0 when nobody listens."""
    choice = choose(call, native is not None, config)
    if config is not None:
        code = choice.rejected[0][1].code if choice.rejected else None
        counters.count(name, choice.route, code if choice.route == "native" else None)
        if choice.route == "native" and config.on_fallback != "native" and not _by_design(call):
            router.object_to(name, config.on_fallback, choice.rejected)
    spent = (time.perf_counter_ns() - start) / 1e3
    if choice.route == "native":
        if start:
            _record(name, call, choice, spent)
        return native()  # type: ignore[misc]
    with _without_autocast(call.device):  # type: ignore[union-attr]
        out = (call.kernel.run()  # type: ignore[union-attr]
               if choice.route == "cuda" else call.plain())  # type: ignore[union-attr]
    if start:
        _watch(name, call, choice, out, _record(name, call, choice, spent))
    return out


def choose(call: OpCall | Reason, native: bool, config: Config | None) -> Choice:
    """The route of a call; ``native``: the host's own code can run it."""
    if type(call) is Reason:
        return Choice("native", ((_KERNELS, call),))
    why = reason("GA104") if config is None else kernel_reason(call, config)
    if why is None and native and _host_is_as_good(call, config):  # type: ignore[arg-type]
        why = reason("GA401",
                     "the tensors are on the CPU, where the host's own kernels are as good")
    if why is None:
        return Choice("cuda", ())
    if not native:
        return Choice("torch", ((_KERNELS, why),))
    against = torch_reason(call, config)  # type: ignore[arg-type]
    return (Choice("torch", ((_KERNELS, why),))
            if against is None else Choice("native", ((_KERNELS, why), (_TORCH, against))))


def kernel_reason(call: OpCall, config: Config) -> Reason | None:
    """Why a call cannot be run by kernels."""
    why = device_reason(call.device, config)
    if why is not None:
        return why
    return (compile_reason(call.kernel)
            if type(call.kernel) is Kernel else call.kernel)  # type: ignore[return-value]


def device_reason(device: torch.device, config: Config) -> Reason | None:
    """Why no kernels run on this device."""
    if config.backend == "torch":
        return reason("GA406", "backend='torch' was asked for")
    if driver.placed():
        return None
    if not kernels_run_on(device):
        return reason("GA401",
                      f"the tensors are on the {device.type}, the kernels need a CUDA device")
    ready, text = driver.available()
    return None if ready else reason("GA402", f"the CUDA kernels cannot run: {text}")


def torch_reason(call: OpCall, config: Config) -> Reason | None:
    """Why torch operations do not stand in for the host's own code where that can run."""
    if config.backend == "cuda":
        return reason("GA406", "backend='cuda' was asked for")
    if config.when == "profitable":
        return reason("GA301", "torch operations gain nothing over the host's own code")
    return None


def _by_design(call: OpCall | Reason) -> bool:
    """Whether going native is no fallback: the host's kernels are the ones for a CPU, or for such a
    call."""
    return call.code == "GA301" if type(call) is Reason else call.device.type == "cpu"


def _host_is_as_good(call: OpCall, config: Config) -> bool:
    return call.device.type == "cpu" and config.when == "profitable"


def _without_autocast(device: torch.device) -> Any:
    """Operands have been cast already, where the host casts them."""
    return (torch.autocast(device.type, enabled=False)
            if torch.is_autocast_enabled(device.type) else _NOTHING)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


_NOTHING = _Nothing()


# --- records --------------------------------------------------------------------------------------

def _fields(name: str, call: OpCall | Reason, choice: Choice) -> dict[str, Any]:
    understood = type(call) is OpCall
    kernel = (None if choice.route == "native" else call.kernel.name  # type: ignore[union-attr]
              if choice.route == "cuda" else _TORCH)
    dtype = (str(call.dtype).removeprefix("torch.")  # type: ignore[union-attr]
             if understood else None)
    device = call.device.type if understood else "cpu"  # type: ignore[union-attr]
    return dict(host=name.partition(".")[0], layer=name, route=choice.route, kernel=kernel,
                dtype=dtype, out_dtype=dtype,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                capturing=device == "cuda" and torch.cuda.is_current_stream_capturing())


def _record(name: str, call: OpCall | Reason, choice: Choice, spent: float) -> int:
    graph = call.graph if type(call) is OpCall else None
    rejected = [dict(candidate=candidate, code=r.code, text=r.text, hint=r.hint)
                for candidate, r in choice.rejected]
    record = records.new(graph=None if graph is None else graph.facts(), rejected=rejected,
                         grad=torch.is_grad_enabled(),
                         cache="none" if graph is None else graph.cached, overhead_us=spent,
                         **_fields(name, call, choice))
    records.emit(record)
    return record["call"]


def _watch(name: str, call: OpCall | Reason, choice: Choice, out: Any, number: int) -> None:
    """Let the first result that is differentiated report its backward."""
    for t in out if isinstance(out, tuple) else (out,):
        if isinstance(t, Tensor) and t.requires_grad:
            t.register_hook(lambda _: _record_backward(name, call, choice, number))
            return


def _record_backward(name: str, call: OpCall | Reason, choice: Choice, forward: int) -> None:
    if records.listening():
        records.emit(records.new(direction="backward", forward_call=forward, grad=True,
                                 **_fields(name, call, choice)))
