"""An operation's way: reasons for and against kernels, torch operations and the host's own code;
the run; the record.

On a CPU the host's own kernels are good, so they run. Where the host has none, on a GPU with a
wheel built without CUDA, torch operations are the last resort.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe import counters, decisions, records, watch
from gnnaccel.dispatch.observe.decisions import Subject
from gnnaccel.dispatch.ops.call import Kernel, OpCall, compile_reason
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.plan.compiling import device_reason
from gnnaccel.dispatch.plan.planner import KERNELS, TORCH, Plan, native_plan
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.uncompiled import uncompiled


def on_cpu_native(name: str, config: Config) -> bool:
    """Whether a call with tensors on the CPU may go native without a further look; counts it
    then."""
    if config.when != "profitable" or records.listening():
        return False
    counters.again(name, "GA401")
    return True


@uncompiled
def run(name: str, call: OpCall | Reason, native: Callable[[], Any] | None,
        config: Config | None) -> Any:
    """Run a call of the operation ``name`` on the best route.

    ``call``: a Reason where it was not understood; ``native``: the host's own code, None where that
    cannot run; then a Reason must not come here. ``config`` None (disabled here): without a word,
    and not by kernels.
    """
    if records.sinks and config is not None:  # `records.listening`, without its call
        return watch.around(watch.Visit(name, None, native, (call,), {}, config), _told)
    return _run(name, call, native, config, 0)


def _told(visit: watch.Visit) -> Any:
    """The run of a call, with a record."""
    return _run(visit.layer, visit.args[0], visit.native, visit.config, time.perf_counter_ns())


def _run(name: str, call: OpCall | Reason, native: Callable[[], Any] | None, config: Config | None,
         start: int) -> Any:
    """Choose the route, run and record. ``start``: when the call began, 0 when nobody listens."""
    plan = choose(call, native is not None, config)
    if config is not None:
        counters.count(name, plan.route, plan.code)
        if plan.route == "native" and config.on_fallback != "native" and not _by_design(call):
            decisions.object_to(name, config.on_fallback, plan.rejected)
    spent = (time.perf_counter_ns() - start) / 1e3
    if plan.route == "native":
        if start:
            _write(name, call, plan, spent)
        return native()  # type: ignore[misc]
    run: Any = call.kernel.run if plan.route == "cuda" else call.plain  # type: ignore[union-attr]
    if torch.is_autocast_enabled(call.device.type):  # type: ignore[union-attr]
        # operands have been cast already, where the host casts them
        with torch.autocast(call.device.type, enabled=False):  # type: ignore[union-attr]
            out = run()
    else:
        out = run()
    if start:
        _write(name, call, plan, spent, out)
    return out


def choose(call: OpCall | Reason, native: bool, config: Config | None) -> Plan:
    """The route of a call; ``native``: the host's own code can run it."""
    if type(call) is Reason:
        return native_plan((KERNELS, call))
    kernel, form = call.kernel, None
    if type(kernel) is Kernel and config is not None:
        drivers = driver.in_place[-1:] or driver.process
        form = (kernel.key, kernel.name, call.device.type,
                native, config.epoch, id(drivers[0]) if drivers else None)
        plan = compiling.chosen.get(form)
        if plan is not None:
            return plan
    why = reason("GA104") if config is None else kernel_reason(call, config)
    if why is None and native and _host_is_as_good(call, config):  # type: ignore[arg-type]
        why = reason("GA401",
                     "the tensors are on the CPU, where the host's own kernels are as good")
    if why is None:
        plan = Plan("cuda", call.kernel.name)  # type: ignore[union-attr]
        if form is not None:
            compiling.choose(form, plan)
        return plan
    against = torch_reason(call, config) if native else None  # type: ignore[arg-type]
    return (Plan("torch", TORCH, ((KERNELS, why),))
            if against is None else native_plan((KERNELS, why), (TORCH, against)))


def kernel_reason(call: OpCall, config: Config) -> Reason | None:
    """Why a call cannot be run by kernels."""
    why = device_reason(call.device.type, config)
    if why is not None:
        return why
    return (compile_reason(call.kernel)
            if type(call.kernel) is Kernel else call.kernel)  # type: ignore[return-value]


def torch_reason(call: OpCall, config: Config) -> Reason | None:
    """Why torch operations do not stand in for the host's own code where that can run."""
    if config.backend == "cuda":
        return reason("GA406", "backend='cuda' was asked for")
    if config.when == "profitable" and not call.gains:
        return reason("GA301", "torch operations gain nothing over the host's own code")
    return None


def _by_design(call: OpCall | Reason) -> bool:
    """Whether going native is no fallback: the host's kernels are the ones for a CPU, or for such a
    call."""
    return call.code == "GA301" if type(call) is Reason else call.device.type == "cpu"


def _host_is_as_good(call: OpCall, config: Config) -> bool:
    return call.device.type == "cpu" and config.when == "profitable"


# --- records --------------------------------------------------------------------------------------

def _write(name: str, call: OpCall | Reason, plan: Plan, spent: float, out: Any = None) -> None:
    host = name.partition(".")[0]
    if type(call) is Reason:
        decisions.told(Subject(host, name), plan, None, spent)
    else:
        subject = Subject(host, name, None, call.device.type, call.dtype, call.dtype)
        decisions.told(subject, plan, call.graph, spent, out)
