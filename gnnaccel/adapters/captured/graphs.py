"""One call of a module as CUDA graphs: its forward and, where gradients are wanted, its backward.

Both are captured as `torch.cuda.make_graphed_callables` does it, into memory of their own. Results
of a replay are copies, so they may be kept. Before a capture is used, a replay is compared with the
module's own call: results, gradients and buffers.
"""
from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.captured import host, recomputed, threads, values
from gnnaccel.adapters.captured.restored import (
    Before, as_before, equal, put_back, random_numbers, set_random_numbers)
from gnnaccel.adapters.captured.results import (
    Backward, Refused, Tied, alike, saved_for, through, used_of)
from gnnaccel.adapters.captured.streams import in_turn
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.run.autograd import one_by_one

_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_freed = torch.empty(0, dtype=torch.float32, device="cpu")


class Work:
    """A call to capture. ``call(arguments)`` runs the module on tensors in the order of
    ``tensors``, with stand-ins for its parameters, ``own(arguments)`` with these themselves, and
    ``aside(arguments, others)`` with other tensors in the places of the module's. ``copied``: for
    each tensor, whether later calls may bring another one of that shape; ``buffers``: of the
    module, which runs on ``device``; ``kept``: its other tensors; ``read``: what its code reads
    besides; ``parameters``: those whose gradients are wanted, and ``aliases`` their stand-ins in
    ``call``; ``grad``: whether autograd records.
    """

    def __init__(self, call: Callable[[list[Tensor]], Any], own: Callable[[list[Tensor]], Any],
                 aside: Callable[[list, dict], Any], tensors: list[Tensor], copied: list[bool],
                 parameters: list[Tensor], aliases: list[Tensor], buffers: list[Tensor],
                 kept: list[Tensor], read: list[Tensor], device: torch.device, grad: bool) -> None:
        self.call, self.own, self.aside = call, own, aside
        self.copied = [*copied]  # a later call may bring others, while a backward waits
        self.buffers, self.grad, self.kept, self.read = buffers, grad, kept, read
        self.kept_and_buffers = [*kept, *buffers]
        self.device = device
        self.parameters, self.aliases = (parameters, aliases) if grad else ([], [])
        first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
        self.inputs = [i for i in sorted(first.values()) if grad and tensors[i].requires_grad]
        self.tensors = tensors

    def lasting(self, tensors: list[Tensor]) -> list[Tensor]:
        """What a replay reads where it lies: tensors of the module, and of the call's those that
        are not copied."""
        return [*self.kept_and_buffers,
                *[t for t, copied in zip(tensors, self.copied) if not copied]]

    def run(self, tensors: list[Tensor], own: bool = False) -> tuple[Any, list[Tensor]]:
        """The form and the tensors of the result; ``own``: with the module's own parameters."""
        results: list[Tensor] = []
        out = self.own(tensors) if own else self.call(tensors)
        try:
            return values.result_apart(out, results), results
        except values.Unknown as problem:
            raise Refused(f"its result holds {problem}") from None


class Captured:
    """A call that is replayed. ``random``: it draws random numbers on the device; ``moving``: the
    module's tensors that it writes to, and ``were`` what they were before the last replay;
    ``copies``: of the arguments of the last replay, None for those that it reads where they lie."""

    def __init__(self, work: Work) -> None:
        """Capture ``work`` and compare. Raises Refused."""
        self.work, self._thread = work, threading.get_ident()
        self._last: weakref.ref | None = None
        stands: dict[int, Tensor] = {}  # one for each tensor, however often it is given
        for t, copied in zip(work.tensors, work.copied):
            if id(t) not in stands:
                held = t.detach().clone() if copied else t
                wanted = work.grad and t.requires_grad
                stands[id(t)] = held.detach().requires_grad_() if wanted else held
        self._static = [stands[id(t)] for t in work.tensors]
        self._leaves = [*work.aliases, *[self._static[i] for i in work.inputs]]
        if not threads.alone():
            raise Refused("other threads call modules, too")
        with (threads.capturing(), _any_stream(), capture.still() as self._held,
              as_before((*work.kept_and_buffers, *work.read), work.device) as before):
            start = random_numbers(work.device)
            try:
                self._warm_up()
                self._look_at_writes(before)
                self.random = not torch.equal(start, random_numbers(work.device))
                self._record()
                self._compare()
            except torch.cuda.OutOfMemoryError:
                raise Refused("a capture takes more memory than there is") from None
            except Refused:
                raise
            except Exception as problem:  # noqa: BLE001 - of the user's code: a backward, say
                first = str(problem).partition("\n")[0]
                raise Refused("its code, run for a capture, raises "
                              f"{type(problem).__name__}: {first}") from None
        # the memory that the graphs read, also where a script gives a parameter other memory
        self._memory = [t.detach() for t in work.kept_and_buffers]
        # callers keep their arguments; kept here are only the tensors that are copied into
        self.copies = [t.detach() if copied else None
                        for t, copied in zip(self._static, work.copied)]
        self._written = {t.untyped_storage().data_ptr() for t in self.moving}
        self._leave_out_unused()
        del self._static, self._leaves
        work.tensors, work.aliases, work.read = [], [], []

    # --- capturing --------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        work, versions = self.work, [t._version for t in self._static]
        numbers = host.Numbers(work.device)
        # as in the capture, where nothing is remembered: what that needs of a graph is made here
        with on_the_side(work.device), records.told():
            for _ in range(2):
                form, outs = work.run(self._static)
                wanted = [out for out in outs if out.requires_grad]
                if work.grad and wanted:
                    torch.autograd.grad(wanted, self._leaves, [torch.ones_like(o) for o in wanted],
                                        allow_unused=True)
        for held, tensor, copied, version in zip(self._static, work.tensors, work.copied, versions):
            # this time it may have written what was there
            if copied and (held._version != version or not torch.equal(held, tensor)):
                raise Refused("it writes to an argument, which is another one in each call")
            wants = work.grad and tensor.requires_grad
            if held is not tensor and held.requires_grad is not wants:
                raise Refused("it asks for gradients of an argument")
        if numbers.drawn():  # by a backward; `modules` has seen forward
            raise Refused("it draws random numbers on the host")
        tied = Tied(outs, [*self._static, *self._leaves, *work.kept_and_buffers, *work.read])
        self._groups = tied.groups
        if tied.why is not None:
            raise Refused(tied.why)
        if not {id(t) for t in self._leaves}.issuperset(map(id, tied.leaves)):
            raise Refused("its result has gradients of what is no parameter and no argument")
        if work.grad and not wanted:
            raise Refused("no result depends on what wants gradients")

    def _look_at_writes(self, before: Before) -> None:
        """Note what the warm-up wrote to."""
        written = [(t, t._version != version) for t, held, version in before
                   if t._version != version or not equal(t, held)]
        read = set(map(id, self.work.read)).difference(map(id, self.work.kept_and_buffers))
        if any(id(t) in read for t, _ in written):
            raise Refused("it writes to a tensor that is no buffer and no attribute of a module")
        self.moving = [t for t, _ in written]
        self._counted = [t for t, counted in written if counted]
        self.were = [torch.empty_like(t.detach()) for t in self.moving] if self.work.grad else []

    def _run(self) -> tuple[Any, list[Tensor]]:
        """What is captured: the call, after a copy of what it is about to write to."""
        for held, t in zip(self.were, self.moving):
            held.copy_(t.detach())
        return self.work.run(self._static)

    def _record(self) -> None:
        work = self.work
        pool = memory_pool(work.device)
        self._forward, (self._form, self._outs) = record(self._run, pool, work.device)
        self._backwards: list[Backward] = []
        self._wants = [o.requires_grad for o in self._outs]
        if not work.grad:
            return
        wanted = [o for o in self._outs if o.requires_grad]
        self._grads = list(map(torch.empty_like, wanted))
        self._backwards = Backward.all_of(len(wanted), self._leaves)
        # the stand-ins of parameters lie where these lie
        lasting = work.lasting(self._static)
        self._saved = [saved_for(o, lasting) for o in wanted]
        with torch.autograd.set_multithreading_enabled(False):
            for way in self._backwards:
                way.replay, _ = record(
                    functools.partial(way.run, wanted, self._grads, work.device), pool, work.device)
        # the record is the graphs' now; its results lie in their memory
        self._outs = [o.detach() for o in self._outs]

    # --- comparing --------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Refused where a replay differs from the call, and where its code tells the tensors that
        stand in for arguments and parameters from these."""
        work, start = self.work, random_numbers(self.work.device)
        written = [*{id(t): t for t in (*work.buffers, *self.moving)}.values()]
        before = [t.detach().clone() for t in written]
        own = self._of_its_own()
        put_back(written, before)
        set_random_numbers(work.device, start)
        _, expected = work.run(self._static)
        wanted = [o for o in expected if o.requires_grad]
        grads = [torch.randn_like(o) for o in wanted]
        gradients = [way.expected(wanted, grads) for way in self._backwards]
        after = [t.detach().clone() for t in written]
        put_back(written, before)
        set_random_numbers(work.device, start)
        self._forward()
        alike(self._outs, own, "the result")
        alike(self._outs, expected, "the result")
        alike(written, after, "a buffer")
        if work.grad:
            for held, g in zip(self._grads, grads):
                held.copy_(g)
            for way, one in zip(self._backwards, gradients):
                alike(way.again(), one, "a gradient")

    def _of_its_own(self) -> list[Tensor]:
        """The results of a call on the arguments and parameters themselves."""
        form, own = self.work.run(self.work.tensors, own=True)
        if form != self._form:
            raise Refused("its result holds other numbers in each call")
        for a, b, wanted in zip(own, self._outs, self._wants):
            if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, wanted):
                raise Refused("its result is of another kind in a replay")
            if a.is_inference():
                raise Refused("its result is made in inference mode")
        return [o.detach() for o in own]

    def _leave_out_unused(self) -> None:
        """Forget leaves of which no result depends: those of the script's own call have no gradient
        there, and their hooks are not called."""
        if not self.work.grad:
            return
        work, used = self.work, used_of(self._backwards)
        parameters = len(work.parameters)
        work.parameters = [work.parameters[at] for at in used if at < parameters]
        work.inputs = [work.inputs[at - parameters] for at in used if at >= parameters]
        for way in self._backwards:
            way.let_go(used)

    # --- replaying --------------------------------------------------------------------------------

    def free(self, tensors: list[Tensor]) -> bool:
        """Whether a replay would overwrite nothing that a later backward needs, nor something in an
        argument that the module's code would read after its write to it."""
        held = None if self._last is None else self._last()
        return ((held is None or held.done) and threading.get_ident() == self._thread
                and (not self._written or not any(
                    copy is not None and t.untyped_storage().data_ptr() in self._written
                    for copy, t in zip(self.copies, tensors))))

    def versions(self, tensors: list[Tensor]) -> list[int]:
        """How often each tensor was written that a replay reads where it lies."""
        return [t._version for t in self.work.lasting(tensors)]

    def replay(self, tensors: list[Tensor]) -> Any:
        """The result of the call with these arguments."""
        with in_turn(self.work.device):
            for held, tensor in zip(self.copies, tensors):
                if held is not None:
                    held.copy_(tensor.detach())
            if not self.work.grad:
                results = iter(self.results())
            else:
                results = iter(_Replay.apply(self, tensors, *self.work.parameters,
                                             *[tensors[i] for i in self.work.inputs]))
        return values.together(self._form, results)

    def results(self) -> list[Tensor]:
        """The results of a replay, whose writes count as those of the module's code do."""
        self._forward()
        for t in self._counted:
            torch.autograd.graph.increment_version(t)
        return [o.clone() for o in self._outs]


class _Pass:
    """A forward pass; ``done`` once no backward needs anything any more. ``freed``: the groups of
    results, see `Tied`, of which a backward was the last; ``versions``: `Captured.versions`."""

    __slots__ = ("done", "freed", "versions", "__weakref__")

    def __init__(self, versions: list[int]) -> None:
        self.done = False
        self.freed: set[int] = set()
        self.versions = versions


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: Captured, tensors: list[Tensor], *leaves: Tensor) -> tuple:
        outs = tuple(captured.results())
        ctx.captured, ctx.tensors = captured, tensors
        ctx.once = _Pass(captured.versions(tensors))
        captured._last = weakref.ref(ctx.once)
        ctx.mark_non_differentiable(*[o for o, wanted in zip(outs, captured._wants)
                                      if not wanted])
        ctx.save_for_backward(_freed)
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        captured: Captured = ctx.captured
        out_grads = [g for g, wanted in zip(grads, captured._wants) if wanted]
        groups = {n for g, n in zip(out_grads, captured._groups) if g is not None}
        if groups & ctx.once.freed:
            _ = ctx.saved_tensors  # raises torch's error
        used = [n for n, g in enumerate(out_grads) if g is not None]
        changed = set() if ctx.once.done else {at for at, (now, then) in enumerate(
            zip(captured.versions(ctx.tensors), ctx.once.versions)) if now != then}
        if changed and any(at in changed for n in used for at in captured._saved[n]):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a parameter, a buffer or an argument of a module whose call "
                "was replayed as a CUDA graph")
        if torch.is_grad_enabled():
            return None, None, *recomputed.gradients(captured, ctx.tensors, out_grads, changed)
        with in_turn(captured.work.device):
            for held, g in zip(captured._grads, out_grads):
                if g is not None:
                    held.copy_(g)
            leaf_grads = through(captured._backwards, used, len(ctx.needs_input_grad) - 2)
        if not _keeps_graph():
            ctx.once.freed |= groups
            if ctx.once.freed.issuperset(captured._groups):
                ctx.once.done, ctx.tensors = True, None
        return None, None, *leaf_grads


# --- the device -----------------------------------------------------------------------------------

@contextlib.contextmanager
def _any_stream() -> Iterator[None]:
    """A block without torch's warning that parameters were first used on another stream."""
    warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if warn is None:
        yield
        return
    warn(False)
    try:
        yield
    finally:
        warn(True)


@contextlib.contextmanager
def on_the_side(device: torch.device) -> Iterator[None]:
    """A block on a stream that can be captured."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)


def memory_pool(device: torch.device) -> Any:
    """The memory of one call's graphs."""
    return torch.cuda.graph_pool_handle()


def record(work: Callable[[], Any], pool: Any, device: torch.device) -> tuple[Callable, Any]:
    """``work`` captured: (function that replays it, its result). Raises Refused."""
    graph = torch.cuda.CUDAGraph()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    clean = generator.clone_state()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
    except RuntimeError as problem:
        _recover(generator, clean, index, pool)
        first = problem.__context__ or problem
        raise Refused("it cannot be captured: " + str(first).splitlines()[0]) from None
    return graph.replay, result


def _recover(generator: Any, clean: Any, index: int, pool: Any) -> None:
    """Recover from a capture that failed, unless torch ended it: its allocator and generator are
    still in it. The one is told that it is over; the other is by the end of another, empty capture.
    ``clean``: the generator's state from before, for a torch in which that is not enough; graphs
    that were captured earlier would then draw from the state that they know."""
    if (end := getattr(torch._C, "_cuda_endAllocateToPool", None)) is not None:
        try:
            end(index, pool)
        except RuntimeError:  # nothing is recorded into the pool: the capture had its end
            return
        torch._C._cuda_releasePool(index, pool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a graph that is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            pass
    try:
        torch.rand(1, dtype=torch.float32, device=torch.device("cuda", index))
    except RuntimeError:
        generator.graphsafe_set_state(clean)
