"""Timing the ways of a script's layers while it runs, for the command line: ``--autotune``."""
from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from gnnaccel import store
from gnnaccel.dispatch import router
from gnnaccel.dispatch.memory.checkpoints import checkpointed
from gnnaccel.dispatch.observe import watch
from gnnaccel.dispatch.observe.records import Record
from gnnaccel.dispatch.observe.watch import Run, Visit
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy import rules, tuned
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.profile.autotune import Tuning, tune
from gnnaccel.profile.frames import Naming, who

_MOST = 256  # kinds of calls in one run


class Tuner:
    """A context manager. Each kind of calls that an earlier run has not timed here is timed before
    the second call of a layer over the same graph: graphs that come once are decided as usual, so
    there is nothing to keep for them. Random numbers, gradients and counts of the script stay what
    they are without it."""

    def __init__(self) -> None:
        self.found: list[Tuning] = []
        self.notes: list[str] = []
        self.known = 0  # kinds of calls that an earlier run has timed
        self._done: set[str] = set()
        self._graphs: IdentityMap[tuple] = IdentityMap()
        self._naming, self._lock = Naming(), threading.RLock()
        self._sink = self._recorded

    def __enter__(self) -> Tuner:
        watch.add(self._watch, self._sink, repeats=True)
        return self

    def __exit__(self, *_: Any) -> None:
        watch.remove(self._watch, self._sink)

    @staticmethod
    def _recorded(record: Record) -> None:
        """Watchers are asked only while somebody listens."""

    def _watch(self, visit: Visit, run: Run) -> Any:
        if visit.adapter is not None and self._possible():
            with self._lock:
                self._look(visit)
        return run(visit)

    def _possible(self) -> bool:
        """Whether here is where a call can be repeated, backward included."""
        if (torch._C._current_graph_task_id() != -1
            or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())):
            return False
        return (len(self._done) < _MOST and not checkpointed()
                and not torch.is_inference_mode_enabled())

    def _look(self, visit: Visit) -> None:
        layer = visit.layer
        if (not rules.verdict(layer, visit.config).inside
            or settings.asked(layer, visit.config) is not None):
            return
        found = visit.adapter.state(layer, visit.args, visit.kwargs)
        if isinstance(found, Reason) or not hasattr(found[0], "request"):
            return  # message passing without an adapter has an estimate of its own
        stated, given = found
        key = tuned.key_of(stated.request(given.device.type, torch.is_grad_enabled(), False))
        if key in self._done or not self._again(layer, given.structure):
            return
        self._done.add(key)
        if key in tuned.kept(tuned.environment(given.device.type)):
            self.known += 1
        else:
            self._time(visit, stated, given)

    def _again(self, layer: Any, structure: tuple[torch.Tensor, ...]) -> bool:
        """Whether the layer's last call was over these very tensors."""
        last, now = self._graphs.get(layer), [(t, t._version) for t in structure]
        self._graphs.set(layer, tuple((weakref.ref(t), version) for t, version in now))
        return last is not None and len(last) == len(now) and all(
            ref() is t and version == held for (ref, held), (t, version) in zip(last, now))

    def _time(self, visit: Visit, stated: Any, given: Any) -> None:
        layer, name = visit.layer, who(self._naming.of(visit.layer), type(visit.layer).__name__)

        def call() -> Any:
            config = configs.current()
            assert config is not None
            return router.route(layer, visit.adapter, visit.native, visit.args, visit.kwargs,
                                config)

        try:
            self.found.append(tune(call, layer, (visit.args, visit.kwargs), stated, given, name))
        except torch.cuda.OutOfMemoryError:
            self.notes.append(f"{name}: not timed, as one of the ways ran out of memory; it is "
                              "decided as usual")
        except OSError as problem:  # the folder could be written when the run began
            self.notes.append(f"{name}: timed, but not kept ({problem}); it is decided as usual")

    def __str__(self) -> str:
        """For a reader."""
        lines = [str(one) for one in self.found] + self.notes
        if self.known:
            lines.append(f"{self.known} kinds of calls go as an earlier run has timed")
        if self.found:
            lines.append(f"kept in {store.folder() / tuned.NAME}")
        return "\n".join(lines or ["nothing was timed: no layer was called twice over the same "
                                   "graph"]) + "\n"
