"""Where accelerated calls run: the plain CPU, the kernels emulated on a CPU, or a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

# No folder: what was calibrated or tuned on this machine is not to change decisions.
os.environ["GNNACCEL_CACHE_DIR"] = os.devnull

import gnnaccel
import torch

NAMES = ("cpu", "emulated", "gpu")


class Backend:
    """One way of running. Inside of `session` patches are in: `on` and `off` cost little."""

    def __init__(self, name: str):
        if name not in NAMES:
            raise ValueError(f"backend is one of {NAMES}, not {name!r}")
        self.name = name
        self.device = torch.device("cuda" if name == "gpu" else "cpu")
        self.forced = {"cpu": {}, "emulated": {"backend": "cuda"}, "gpu": {}}[name]

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Around all cases of a process: patches, and the driver of the emulation."""
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        with self._driver(), gnnaccel.enabled(**self.forced), gnnaccel.disabled():
            yield

    def _driver(self):
        if self.name != "emulated":
            return contextlib.nullcontext()
        from gnnaccel.cuda.runtime import driver
        from tests.emulation.emulator import EmulatedDriver

        return driver.using(EmulatedDriver())

    def on(self, **options: Any):
        """A block in which layers are taken over wherever possible, or as ``options`` say."""
        block = gnnaccel.enabled(**{"when": "supported", **self.forced, **options})
        return block if self.name == "gpu" or not options.get("capture") else _recorded(block)

    @contextlib.contextmanager
    def splitting(self, seed: int) -> Iterator[None]:
        """A block in which rows of fewer edges than usual are split over warps, and products and
        linear maps of few rows run by the kernels for many, for some seeds."""
        from gnnaccel.adapters import linear
        from gnnaccel.cuda.structures import structure
        from gnnaccel.dispatch.graph import cache
        from gnnaccel.dispatch.run import skinny_matmul

        size, few = (16, 48, None)[seed % 3], seed // 3 % 2 == 0
        with contextlib.ExitStack() as patches:
            if size is not None:
                patches.enter_context(mock.patch.object(structure, "chunk_edges", lambda edges: size))
            if few:
                for module, name in ((skinny_matmul, "TALL"), (cache, "LARGE"), (linear, "MANY"),
                                     (linear, "_MANY_OF_WEIGHT"), (linear, "LEAST")):
                    patches.enter_context(mock.patch.object(module, name, 1))
            yield

    @contextlib.contextmanager
    def by_reference(self, seed: int) -> Iterator[None]:
        """A block in which torch computes what kernels are written for, for three of four seeds:
        nothing is compiled, so that ten times as many programs are read, kept and repeated."""
        with contextlib.ExitStack() as patches:
            if self.name == "emulated" and seed % 4:
                from gnnaccel.dispatch.generated import messages, operations

                patches.enter_context(mock.patch.object(messages, "prepare", lambda *args: None))
                for kind in operations.Reduced.__subclasses__():
                    patches.enter_context(mock.patch.multiple(
                        kind, forward=_reference_forward, backward=_reference_backward))
            yield

    def finish(self) -> None:
        """Wait for the device, so that a fault in it is raised here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _reference_forward(operation: Any, needs: Any, *inputs: torch.Tensor) -> tuple:
    with torch.no_grad():
        return operation.reference(*inputs), inputs


def _reference_backward(operation: Any, needs: Any, saved: Any, *grads: Any) -> list:
    with torch.enable_grad():
        rows = [t.detach().requires_grad_(need) for t, need in zip(saved, needs)]
        outs = operation.reference(*rows)
    outs = outs if isinstance(outs, tuple) else (outs,)
    of = [(out, grad) for out, grad in zip(outs, grads) if grad is not None and out.requires_grad]
    wanted = [t for t in rows if t.requires_grad]
    found = iter(torch.autograd.grad([out for out, _ in of], wanted, [grad for _, grad in of],
                                     allow_unused=True) if of else [None] * len(wanted))
    return [next(found) if t.requires_grad else None for t in rows]


@contextlib.contextmanager
def _recorded(block: Any) -> Iterator[None]:
    """The block, with a stand-in for CUDA graphs on the CPU."""
    from gnnaccel.adapters.captured import graphs, modules

    from tests.pyg import recorded

    with (mock.patch.multiple(graphs, record=recorded.record, memory_pool=lambda device: None,
                              on_the_side=lambda device: contextlib.nullcontext()),
          mock.patch.object(modules, "DEVICES", {"cpu"}), block):
        yield


def off():
    """A block in which every layer is the host's own."""
    return gnnaccel.disabled()
