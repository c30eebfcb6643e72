"""`Generated`: messages that are an expression of rows at both ends and at the edge, reduced by
kernels that are written for it."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel.cuda.messages import generated, generated_attention
from gnnaccel.cuda.messages.expression import CHANNEL_SUM, Expression
from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.cuda.traverse import edge_softmax
from gnnaccel.dispatch.generated import operations
from gnnaccel.dispatch.generated.tree import BY_TORCH
from gnnaccel.dispatch.graph import self_loops
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ops import torch_ops
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import wants_grad

_TARGETS = {"j": "u", "i": "v", "e": "e", "p": "p"}
EXTREMA, WRITTEN = generated.EXTREMA, generated.WRITTEN
REDUCES = ("sum", "mean", *EXTREMA)
#: reductions of messages that are written for each edge
MOMENTS = ("var", "std")
#: softmax over the edges that enter a node ("i"), or that leave one ("j")
SOFTMAX = {"i": "softmax", "j": "softmax by source"}
SOFTMAXES = frozenset(SOFTMAX.values())
MOST = 12  # rows of inputs, and twice as many inputs in all: each takes registers of every lane


class Generated(NamedTuple):
    """Message that kernels are written for.

    ``inputs``: fp32 [rows, numbers] for each input of the ``expression``: nodes or edges, or one
    row of a parameter, with as many numbers as its mode has; ``numbers``: of the expression;
    ``shape``: of a message; ``seen``: its (heads, width) for the kernels. ``weight``
    [out, in], ``bias`` [out]: of a linear map that each message goes through in the end, which is
    done with their sums. ``before``: values written for each edge first, to make inputs of:
    messages with how ("rows" or "heads", as of `at_edges`, or one of `REDUCES`, as of `reduced`),
    and numbers of columns with one of `SOFTMAX`. ``made``: how many inputs are computed for the
    call, as by a linear map of features, rather than passed to it; ``kinds``: how many inputs there
    are beyond those of the host, which maps the rows of each kind of edges apart, for these alone;
    ``edge_kinds``: likewise, of rows of the edges; ``pieces``: the numbers of the inputs that
    `operations.Pieces` cut out of rows.
    """

    expression: Expression
    inputs: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    shape: tuple[int, ...]
    seen: tuple[int, int]
    weight: Tensor | None = None
    bias: Tensor | None = None
    before: tuple[tuple[Any, str], ...] = ()
    made: int = 0
    kinds: int = 0
    edge_kinds: int = 0
    pieces: tuple[int, ...] = ()

    @property
    def tensors(self) -> dict[str, tuple[Tensor, str]]:
        """Tensors by name with their targets, as of other messages (`ops.messages`)."""
        names = self.expression.names
        inputs = {name: (t, _TARGETS[source.end])
                  for name, source, t in zip(names, self.expression.inputs, self.inputs)}
        linear = dict(weight=self.weight, bias=self.bias)
        return {**inputs, **{name: (t, "p") for name, t in linear.items() if t is not None}}

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of inputs, with those of ``before``; of values in ``before``; and of inputs that
        are computed for the call."""
        written = [message.sizes for message, how in self.before if how not in SOFTMAXES]
        return (len(self.all_inputs), len(self.before) + sum(size[1] for size in written),
                self.made + sum(size[2] for size in written))

    @property
    def by_source(self) -> bool:
        """Whether a value in ``before`` needs the edges that leave a node."""
        return any([how == SOFTMAX["j"] or how not in SOFTMAXES and message.by_source
                    for message, how in self.before])

    @property
    def written(self) -> int:
        """Bytes of the values in ``before``, for each edge."""
        numbers = {"rows": lambda m: math.prod(m.shape), "heads": lambda m: m.seen[0]}
        return sum([4 * message if how in SOFTMAXES else
                    message.written + 4 * (numbers[how](message) if how in numbers else 0)
                    for message, how in self.before])

    @property
    def all_inputs(self) -> tuple[Tensor, ...]:
        """The inputs and those of ``before``."""
        return (*self.inputs, *[t for message, how in self.before if how not in SOFTMAXES
                                for t in message.all_inputs])

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of a message after the map."""
        return self.shape if self.weight is None else (self.weight.shape[0],)

    def only(self, at: int) -> Generated:
        """One of several messages that the expression has."""
        return self._replace(expression=self.expression.only((at,)))

    @property
    def rows_read(self) -> tuple[int, int]:
        """Rows per edge: those that the kernels read, and those that the host gathers of nodes."""
        ends = [source.end for source in self.expression.inputs if source.mode == "row"]
        read, gathered = ends.count("j") + ends.count("e"), ends.count("j") + ends.count("i")
        for message, how in self.before:
            if how not in SOFTMAXES:
                ours, hosts = message.rows_read
                read, gathered = read + ours + (how == "rows"), gathered + hosts
        return max(1, read), max(1, gathered - self.kinds)

    def __str__(self) -> str:
        return (str(self.expression)
                if self.weight is None else f"a linear map of {self.expression}")


class Several(NamedTuple):
    """Several messages, each reduced for itself: a `Part` names the message to aggregate."""

    parts: tuple[Generated, ...]

    @property
    def tensors(self) -> dict[str, tuple[Tensor, str]]:
        return {f"{name}_{at}": one for at, part in enumerate(self.parts)
                for name, one in part.tensors.items()}

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the first message; each has its own."""
        return self.parts[0].out

    def __str__(self) -> str:
        return ", ".join(map(str, self.parts))


class Part(NamedTuple):
    """The reduction ``how``, one of `REDUCES`, of the message at place ``at`` of `Several`, or of
    the messages of one expression."""

    how: str
    at: int

    @property
    def name(self) -> str:
        return self.how


def unfit(graph: OpGraph, x: Tensor, more: Generated) -> Reason | None:
    """Why ``more`` is no message over the graph. ``x``: features that decide about the device."""
    for message, how in more.before:
        why = unfit(graph, x, message) if how not in SOFTMAXES else None
        if why is not None:
            return why
    rows = _rows(more.expression)
    if rows > MOST or len(more.inputs) > 2 * MOST:
        return reason("GA208", f"a message of {len(more.inputs)} tensors, {rows} of them with a "
                      "number for each channel")
    heads, width = more.seen
    sizes = {"row": heads * width, "head": heads, "one": 1}
    counts = {"j": graph.num_src, "i": graph.num_dst, "e": graph.num_edges, "p": 1}
    device, strided, fp32 = x.device, torch.strided, torch.float32
    for at, (end, mode) in enumerate(more.expression.inputs):
        t = more.inputs[at]
        if (t.dtype is not fp32 or t.shape != (counts[end], sizes[mode]) or t.device != device
            or t.layout is not strided or t.is_neg()):
            return _misfit(more.expression.names[at], t, [counts[end], sizes[mode]], device)
    if self_loops.of(graph.edge_index) is not None:
        return reason("GA208", "edges that stand for others in a generated message")
    return None


def _misfit(name: str, t: Tensor, wanted: list[int], device: torch.device) -> Reason:
    if t.dtype != torch.float32:
        return reason("GA203", f"{name} of a generated message is {t.dtype}, not torch.float32")
    return reason("GA206", f"{name} of a generated message is {list(t.shape)}, on {t.device}; its "
                  f"kernels want {wanted}, on {device}")


@functools.lru_cache(maxsize=512)
def _rows(expression: Expression) -> int:
    """How many inputs have a number for each channel."""
    return [source.mode for source in expression.inputs].count("row")


def made(graph: OpGraph, more: Generated, take: Callable = torch_ops.take) -> Tensor:
    """[E, *out]: the messages, on torch operations, with their weights. ``take``: as in
    `ops.messages.made`."""
    heads, width = more.seen
    shapes = {"row": (-1, heads, width), "head": (-1, heads, 1), "one": (-1, 1, 1)}
    values: list = []
    for (t, target), source in zip(more.tensors.values(), more.expression.inputs):
        at_edges = t if target == "p" else take(graph, t, target)
        values.append(at_edges.view(shapes[source.mode]))
    values += more.numbers
    for op, args in more.expression.steps:
        operands = [values[a] for a in args]
        values.append(operands[0].expand(-1, heads, width).sum(-1, keepdim=True)
                      if op == CHANNEL_SUM else BY_TORCH[op](*operands))
    message, score = values[more.expression.out], more.expression.score
    if score is not None:
        message = torch_ops.edge_softmax(graph, values[score]) * message
    message = message.expand(graph.num_edges, heads, width).reshape(-1, *more.shape)
    return message if more.weight is None else F.linear(message, more.weight, more.bias)


def prepare(more: Generated, of: str, grad: bool) -> None:
    """Compile the kernels that `run`, or `at_edges`, launches, and with ``grad`` those of backward.
    ``of``: one of `REDUCES`, "rows" or "heads"."""
    for message, how in more.before:
        if how not in SOFTMAXES:
            prepare(message, how, grad)
        else:
            for entry in edge_softmax.ENTRIES[:4 if grad else 2]:
                edge_softmax.kernels(message, torch.float32, False)(entry)
    heads, width = more.seen
    if more.expression.score is not None:
        _prepare_attention(more, grad)
        return
    for entry in ("at_edges",) if of in WRITTEN else ("forward", "merge"):
        generated.kernels(more.expression, heads, width, False, of=of)(entry)
    if not grad:
        return
    twins, needs = generated.without_twins(more.expression,
                                           tuple(t.requires_grad for t in more.inputs))
    for by_row in (True, False):
        for entry in generated.entries(more.expression, needs, by_row):
            generated.kernels(more.expression, heads, width, False, needs, by_row, of)(entry)
    for negated in {negated for _, _, negated in twins}:
        for entry in ("forward", "merge"):
            generated.kernels(generated.COPIES[negated], heads, width, False)(entry)


def _prepare_attention(more: Generated, grad: bool) -> None:
    needs = tuple(t.requires_grad for t in more.inputs)
    for entry in ("forward", "merge"):
        generated_attention.kernels(more.expression, *more.seen, False)(entry)
    if grad:
        for by_row, entries in generated_attention.entries(more.expression, needs).items():
            for entry in entries:
                generated_attention.kernels(more.expression, *more.seen, False, needs,
                                            by_row)(entry)


def key(more: Generated, of: str) -> tuple:
    """Key of the kernels of `prepare`: all they depend on but the graph."""
    grad = wants_grad(*more.all_inputs)
    return ("generated", of, more.expression, more.seen,
            tuple([t.requires_grad and grad for t in more.inputs]),
            tuple([key(*pair) if pair[1] not in SOFTMAXES else pair for pair in more.before]))


def run(graph: OpGraph, reduce: str, more: Generated) -> Any:
    """[num_dst, *out]: one of `REDUCES` or of `MOMENTS` of the messages, by kernels; a list of sums
    or means where the expression has several messages. The largest and smallest have no linear map
    in the end, and just sums are weighted."""
    if reduce in MOMENTS:
        return _moment(graph, reduce, more)
    if more.expression.others:
        return list(operations.GeneratedSums(graph, reduce, more).apply(*more.inputs))
    kind: type[operations.Reduced] = (operations.GeneratedExtremum if reduce in EXTREMA
                                      else operations.GeneratedSum)
    if more.expression.score is not None:
        kind = operations.GeneratedAttention
    out = kind(graph, reduce, more).apply(*more.inputs)
    if more.weight is None:
        return out
    out = F.linear(out, more.weight)
    if more.bias is None:
        return out
    # each message brings the bias, and a mean has it where there is a message
    return torch.addr(out, _messages(graph.view(), reduce == "mean"), more.bias)


def _moment(graph: OpGraph, reduce: str, more: Generated) -> Tensor:
    from gnnaccel.dispatch.ops import multi_reduce  # which needs this module

    rows = at_edges(graph, more._replace(weight=None, bias=None), False)
    if more.weight is not None:
        rows = F.linear(rows, more.weight, more.bias)
    return multi_reduce.run(graph, rows, (reduce,), of_edges=True).view(-1, *more.out)


def _messages(view: GraphView, mean: bool) -> Tensor:
    """fp32 [num_dst]: messages that each node gets; of a ``mean``, 1 where there are some."""
    def make() -> tuple[Tensor]:
        count = view.csc(places=False).indptr.diff()
        return ((count.clamp(max=1) if mean else count).float(),)

    return make()[0] if capture.capturing() else view.derived(("messages", mean), make)[0]


def reduced(graph: OpGraph, reduce: str, more: Generated) -> Tensor:
    """[num_dst, *out]: one of `REDUCES` of the messages, by kernels where they run."""
    if driver.runs_on(more.inputs[0].device):
        return run(graph, reduce, more)
    from gnnaccel.dispatch.ops import aggregation  # which needs this module

    return aggregation.plain(graph, aggregation.Aggregation(reduce, more.inputs[0], None, more.out,
                                                            more))


def at_edges(graph: OpGraph, more: Generated, summed: bool) -> Tensor:
    """[E, *shape]: the value of each edge; if ``summed``, [E, heads] with heads as in
    `Generated.seen`: sums over each head's channels. By kernels, where they run: in fp32."""
    if not driver.runs_on(more.inputs[0].device) or any(t.dtype is not torch.float32
                                                        for t in more.inputs):
        message = made(graph, more)
        return message.view(-1, *more.seen).sum(-1) if summed else message
    form = "heads" if summed else "rows"
    return operations.GeneratedAtEdges(graph, form, more).apply(*more.inputs)
