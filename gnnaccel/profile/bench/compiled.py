"""torch.compile'd PyG layers, each in a process of its own.

Compiling takes long, can hang, and can leave the device unusable ("fails to launch"); a process can
be ended when its time is up and takes its troubles along. Several compile at once, but they are
timed one after the other while the others wait, so that nobody's compilation disturbs a
measurement.

torch is imported inside functions only, and a worker is handed plain data: it sets the compiler's
environment before torch is loaded.
"""
from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gnnaccel.profile.bench.result import Record

if TYPE_CHECKING:
    from gnnaccel.profile.bench.guard import Budget
    from gnnaccel.profile.bench.plan import Plan

MODES = ("forward", "training")
SMALL_EDGES = 10_000_000
"""Up to here layers compile side by side; larger graphs need the memory for themselves."""


class Worker:
    """The near end of one process that compiles and times one layer on one shape, mode by mode."""

    def __init__(self, shape, layer: str, device: str, settings: dict) -> None:
        self.shape, self.layer, self.device = shape, layer, device
        self.error: str | None = None
        self._kind = settings.get("kind", "layer")
        spawn = multiprocessing.get_context("spawn")
        self._pipe, far = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(far, dataclasses.asdict(shape), layer,
                                                           device, settings))
        self._process.start()
        far.close()

    def start(self, mode: str) -> None:
        """Let it compile and run once; `ready` waits for that."""
        self._send(("warm", mode))

    def ready(self, deadline: float) -> None:
        if self.error is None:
            self.error = self._receive(deadline - time.monotonic(), "compiling")

    def record(self, mode: str, limit_s: float) -> Record:
        """Time the mode that is ready, within ``limit_s`` seconds; or the record of why not."""
        found = Record(self._kind, self.shape.name, self.layer, mode, "compiled", self.device)
        if self.error is None:
            self._send(("time", mode))
            answer = self._receive(limit_s, "measuring")
            if isinstance(answer, tuple):
                found.timing, found.values = answer
            else:
                self.error = answer
        found.error = self.error
        # A failure of one mode (out of memory in training, say) leaves a living worker fit for the
        # next.
        if self._process.is_alive():
            self.error = None
        return found

    def end(self) -> None:
        """Hang up, which ends an idle worker by itself, and end a busy one."""
        self._pipe.close()
        self._process.join(5.0 if self.error is None else 0.1)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _send(self, message: tuple) -> None:
        if self.error is None:
            try:
                self._pipe.send(message)
            except OSError:
                self.error = "the process ended"

    def _receive(self, seconds: float, doing: str):
        """The answer, or text when there is none: the process is ended then."""
        try:
            if self._pipe.poll(max(0.0, seconds)):
                return self._pipe.recv()
            answer = f"time limit reached while {doing}"
        except (EOFError, OSError):
            answer = f"the process ended while {doing}"
        self._process.kill()
        self._process.join()
        self.error = answer
        return answer


def compiled_records(jobs: list[tuple], device: str, settings: dict,
                     limit_s: float) -> Iterator[Record]:
    """Records of (shape, layer name) jobs that compile side by side. ``limit_s`` seconds bound a
    mode's compilation."""
    threads = max(1, (os.cpu_count() or 1) // len(jobs))
    workers = [Worker(shape, layer, device, {**settings, "threads": threads})
               for shape, layer in jobs]
    try:
        for mode in MODES:
            for worker in workers:
                worker.start(mode)
            deadline = time.monotonic() + limit_s
            for worker in workers:
                worker.ready(deadline)
            for worker in workers:
                yield worker.record(mode, limit_s)
    finally:
        for worker in workers:
            worker.end()


def by_waves(plan: Plan, budget: Budget, kind: str = "layer",
             jobs: list[tuple] | None = None) -> Iterator[Record]:
    """The records of ``jobs``, (shape, layer name) each, or of those of the plan, small graphs
    first, as long as the budget lasts. ``kind``: of the records."""
    if jobs is None:
        jobs = [(shape, layer.name) for shape, layers in plan.jobs for layer in layers]
    settings = {"seed": plan.seed, "order": plan.order, "effort": dataclasses.asdict(plan.effort),
                "kind": kind}
    for wave in waves(jobs):
        if budget.spent:
            return
        yield from compiled_records(wave, plan.device.type, settings,
                                    min(plan.compile_limit, budget.left))


def waves(jobs: list[tuple]) -> list[list[tuple]]:
    """Jobs grouped into those that may compile side by side, in order."""
    small = [job for job in jobs if job[0].num_edges <= SMALL_EDGES]
    large = [job for job in jobs if job[0].num_edges > SMALL_EDGES]
    return [small[i:i + 8] for i in range(0, len(small), 8)] + [[job] for job in large]


def _serve(pipe, recipe: dict, layer: str, device: str, settings: dict) -> None:
    """The worker's loop: answers None or a text to "warm", (timing, memory) or a text to "time"."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(settings["threads"])
    import torch

    from gnnaccel.profile.bench import cells, guard, timing

    graph = step = None
    while True:
        try:
            order, mode = pipe.recv()
        except EOFError:
            return

        def obey(order=order, mode=mode):
            nonlocal graph, step
            if order == "time":
                return cells.measure_step(step, timing.Effort(**settings["effort"]))
            step = None
            kind = settings.get("kind", "layer")
            graph = graph or _graph(kind, recipe, device, settings)
            step = _compiled_step(kind, layer, graph, mode)
            step()
            timing.release(graph.device)

        try:
            value, error = guard.guarded(obey, torch.device(device))
        except guard.DeviceLost as problem:
            pipe.send(f"{problem} (the device was unusable afterwards)")
            return
        pipe.send(error or value)


def _graph(kind: str, recipe: dict, device: str, settings: dict):
    from gnnaccel.profile.bench import relation_graph, shapes

    where = device, settings["seed"], settings["order"]
    if kind == "relation":
        return relation_graph.make(relation_graph.RelationShape(**recipe), *where)
    return shapes.make(shapes.Shape(**recipe), *where)


def _compiled_step(kind: str, layer: str, graph, mode: str):
    """``kind``: of the records, which says whose layer it is: "layer", one with attention,
    "aggregate" or "relation"."""
    import torch

    from gnnaccel.adapters.pyg.bench import layers as pyg
    from gnnaccel.adapters.pyg.bench import plain, relational
    from gnnaccel.profile.bench import steps, suite_aggregate

    torch._dynamo.reset()
    step: Any
    if kind == "relation":
        step = steps.relation_step(relational.LAYERS[layer], graph, mode)
    elif kind == suite_aggregate.KIND:
        step = suite_aggregate.layer_step(plain.LAYERS[layer], graph, mode)
    else:
        step = steps.layer_step(pyg.resolve(layer), graph, mode)
    # Compiled where Step calls it: Step keeps the plain layer's parameters and modes.
    compiled: Any = torch.compile(step.module, dynamic=False)
    step.module = compiled
    return step
