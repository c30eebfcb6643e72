"""The compatibility table: every layer's options, asked of the adapters and of what the kernels
declare, without running kernels.

``python -m tests.record_compatibility`` prints ``docs/compatibility.md`` but for its last
section, which ``python -m tests.matrix --table`` prints.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gnnaccel import adapters, session
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe.watch import Run, Visit
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.policy import config
from gnnaccel.profile.compare import watching
from gnnaccel.profile.sides import Decided, decided

HOSTS = {"pyg": "PyTorch Geometric", "dgl": "DGL"}
_HEAD = """# Compatibility

What becomes of each layer's options, in training, over a graph that comes again. *GPU*: the kernels that run, or the codes
([reasons.md](reasons.md)) for which the host's own code does. *CPU*: whether the torch backend can run it (`when="supported"`);
whether it does depends on sizes, as it has to be estimated to be faster. Options not listed were not asked about. Where a layer's
message passing alone is taken over ([layers.md](layers.md) names such layers of PyG), the rows are about that.
`gnnaccel.explain(model, *inputs)` tells about a call of yours.

The tables of layers are made by `python -m tests.record_compatibility`, from the adapters and what the kernels declare. The last
table is made by `make matrix`.
"""


class _NoKernels:
    """A driver whose kernels compile to nothing: the question is what would be asked of it."""

    name = "none"

    def kernel(self, family: str, entry: str, defines: tuple) -> Any:
        return lambda *launch: None

    def ahead(self, compile_: Callable[[], None]) -> None:
        """Nothing is compiled."""

    together = ahead

    def ready(self, compile_: Callable[[], None]) -> bool:
        """Always."""
        return True


def answer(layer: Any, args: tuple, kwargs: dict, backend: str) -> str:
    """The kernel that would run the call with ``backend``, or the codes of what speaks against
    it."""
    with session.enabled(backend=backend, when="supported"):
        adapter = adapters.adapter_of(layer)
        if adapter is None:
            decision = _of_message_passing(layer, args, kwargs)
        else:
            decision = decided(Visit(layer, adapter, None, args, kwargs, config.current()),
                               grad=True)
    if (decision.plan is not None and decision.plan.kernel is not None
        and decision.route != "native"):
        return decision.plan.kernel
    return ", ".join(dict.fromkeys(r.code for _, r in decision.rejected if r.code != "GA406"))


def _of_message_passing(layer: Any, args: tuple, kwargs: dict) -> Decided:
    """The decision on the first that ``layer``, which has no adapter, does; it runs natively."""
    found = []

    def look(visit: Visit, run: Run) -> Any:
        found.append(decided(visit, grad=True))
        return visit.native(visit.layer, *visit.args, **visit.kwargs)

    with watching(look, lambda record: None):
        layer(*args, **kwargs)
    return found[0]


def rows(host: str) -> Iterator[tuple[str, str, str, str]]:
    """(class, option, on a GPU, on a CPU) of one host, each class's together."""
    module = importlib.import_module(f"tests.{host}.options")
    known = importlib.import_module(f"gnnaccel.adapters.{host}")
    planner.forget()
    try:
        with driver.using(_NoKernels()):
            asked = [(name, option, answer(layer, args, kwargs, "cuda"), layer, args, kwargs)
                     for name, option, layer, args, kwargs in module.cases()]
    finally:
        planner.forget()  # what was planned for a driver that is none
    for name in dict.fromkeys([*(case[0] for case in asked), *known.LAYERS]):
        of_class = [case for case in asked if case[0] == name]
        if not of_class:
            yield name, "not asked about", "", ""
        for _, option, on_gpu, layer, args, kwargs in of_class:
            on_cpu = answer(layer, args, kwargs, "torch")
            yield name, option, on_gpu, on_cpu if on_cpu.startswith("GA") else "yes"


def document() -> str:
    import torch

    parts = [_HEAD]
    with torch.device("cpu"):  # whatever the default device is
        for host, title in HOSTS.items():
            parts.append(f"## {title}\n\n| layer | option | GPU | CPU |\n|---|---|---|---|")
            before = None
            for name, option, on_gpu, on_cpu in rows(host):
                parts.append(f"| {'' if name == before else f'`{name}`'} | {option} | {on_gpu} | "
                             f"{on_cpu} |")
                before = name
            parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(document())
