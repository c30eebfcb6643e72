"""One small check per family of kernels against torch in fp64: do they compile here, and are their
numbers right?

Needs torch, so it is imported only once that is known to work. Runs on any device that the kernels
run on, the tests' emulation included.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda import adam
from gnnaccel.cuda.attention import blend_grad
from gnnaccel.cuda.int8 import int8_gemm, quantize
from gnnaccel.cuda.runtime import driver
from gnnaccel.cuda.segment import segment_backward, segment_gemm, segment_gemm_grad
from gnnaccel.cuda.segment.segment_plan import Segments
from gnnaccel.cuda.structures import join, pairs, tile_ptr
from gnnaccel.cuda.traverse import column_sum, dropout, edge_list, gather, head_dot, host_rows
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir import attention_programs
from gnnaccel.dispatch.ops import (aggregation, aggregation_messages, aggregation_softmax, calls,
                                   multi_reduce, operands, outer_sums, plain)
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_means import Softmax
from gnnaccel.dispatch.ops.call import OpCall
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Gated, Rectified
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.run import attention, torch_backend

TOLERANCE = 2e-5  # relative L2 error, of fp32 against fp64
_HUB = 1500  # edges into one node: a row longer than one warp carries


class Case:
    """A random graph with a hub and isolated nodes, and random tensors on ``device``; the same each
    time."""

    def __init__(self, device: torch.device):
        self.device, self._generator = device, torch.Generator("cpu").manual_seed(0)
        src, dst = (torch.randint(0, 90, (2000,), generator=self._generator, device="cpu")
                    for _ in range(2))
        dst[:_HUB] = 7
        self.src, self.dst = src.to(device), dst.to(device)
        self.edge_index, self.nodes = torch.stack([self.src, self.dst]), 100
        self.view = GraphView(self.edge_index, self.nodes, self.nodes)
        self.graph = OpGraph(self.edge_index, self.nodes, self.nodes)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float32,
                           device="cpu").to(self.device)


Check = Callable[[Case], Iterator[tuple[str, float]]]


def error(got: Tensor, exact: Tensor) -> float:
    """The relative error in the L2 norm; inf where numbers are not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


def _structure(case: Case) -> Iterator[tuple[str, float]]:
    small, large = _grouped(case, 1), _grouped(case, 5)  # which is built in several launches
    for family, is_right in large.items():
        is_right &= small[family] and (family != "structure" or _joins(case))
        yield family, 0.0 if is_right else float("inf")


def _grouped(case: Case, times: int) -> dict[str, bool]:
    """What is right about the index arrays of the case's edges, so many times over."""
    edges = case.edge_index.repeat(1, times)
    rows = GraphView(edges, case.nodes, case.nodes).csc()
    degrees = torch.bincount(edges[1], minlength=case.nodes)
    row = torch.arange(case.nodes, device=case.device).repeat_interleave(degrees)
    place, other = rows.place[:len(row)].long(), rows.other[:len(row)].long()
    return {"structure": torch.equal(edges[:, place], torch.stack([other, row])),
            "row_split": torch.equal(rows.indptr.diff().long(), degrees),
            "row_order": bool(((place.diff() > 0) | (row.diff() > 0)).all())}


def _pairs(case: Case) -> Iterator[tuple[str, float]]:
    types = case.src % 3
    found = pairs.number(case.src, case.dst, types, case.nodes,  # type: ignore[union-attr]
                         case.nodes, 3).pairs[1]
    keys, of_edge, counts = torch.unique(types * case.nodes + case.dst, return_inverse=True,
                                         return_counts=True)
    share = pairs.shares(found.of_edge, pairs.counted(found.of_edge, len(keys)), torch.float64)
    right = all(torch.equal(got.long(), expected) for got, expected in (  # type: ignore[union-attr]
        (found.relation * case.nodes + found.node, keys), (found.of_edge, of_edge),
        (pairs.sort_types(types, 3).order,  # type: ignore[union-attr]
         torch.sort(types, stable=True).indices)))
    right = right and _tiles(case)
    yield "pairs", error(share, 1 / counts[of_edge].double()) if right else float("inf")


def _gather(case: Case) -> Iterator[tuple[str, float]]:
    x = case.normal(case.nodes, 64)
    exact = torch.zeros_like(x).double().index_add(0, case.dst, x[case.src].double())
    # rows that are split stay incomplete, by design
    short = torch.bincount(case.dst, minlength=case.nodes) < 64
    yield "gather", error(gather.row_gather(case.view.csc(), x)[short], exact[short])


def _dropout(case: Case) -> Iterator[tuple[str, float]]:
    mask = dropout.factors(dropout.Dropout(0.25, 1234, 5), 4000, 2, case.device).cpu()
    scale = torch.tensor(1 / 0.75, device="cpu")
    kept = (mask == scale).double().mean()
    right = bool(((mask == 0) | (mask == scale)).all()) and abs(float(kept) - 0.75) < 0.03
    yield "dropout", 0.0 if right else float("inf")


def _head_dot(case: Case) -> Iterator[tuple[str, float]]:
    x, att, d = case.normal(case.nodes, 8, 8), case.normal(8, 8), case.normal(case.nodes, 8)
    scores, grad = head_dot.dot(x, att)[0], head_dot.dot_grad(x, d)[0]
    exact = (x.double() * att.double()).sum(-1), (x.double() * d.double().unsqueeze(-1)).sum(0)
    yield "head_dot", max(error(scores, exact[0]), error(grad, exact[1]))


def _column_sum(case: Case) -> Iterator[tuple[str, float]]:
    x = case.normal(777, 40)
    yield "column_sum", error(column_sum.column_sum(x), x.double().sum(0))


def _host_rows(case: Case) -> Iterator[tuple[str, float]]:
    x = case.normal(90, 12)
    far, back = (t.pin_memory() if x.is_cuda else t for t in (x.cpu(), torch.zeros_like(x.cpu())))
    ids = torch.arange(90, device="cpu") * 7 % 90  # each once, in another order
    close = torch.empty_like(x)
    host_rows.fetch(far, ids.int().to(x.device), close)
    wrong = error(close, x[ids.to(x.device)].double())
    host_rows.put(close, ids.int().to(x.device), back)
    if x.is_cuda:
        torch.cuda.synchronize()
    yield "host_rows", max(wrong, error(back, far.double()))


def _adam(case: Case) -> Iterator[tuple[str, float]]:
    x, grad = case.normal(111, 40), case.normal(111, 40)
    expected = x - 0.1 * grad.double() / (grad.double().abs() + 1e-3)  # of a first step
    numbers = adam.Numbers(-1.0, 0.001 ** 0.5, 0.1, 0.999, 0.001, 1e-3, 0.0, 1.0, False)
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    adam.Tensors([x], [mean], [square]).step([grad.data_ptr()], numbers)
    yield "adam", error(x, expected)


def _additive(case: Case) -> Iterator[tuple[str, float]]:
    program = attention_programs.gat(0.2, 0.0, True, True, False)
    tensors = {"x": case.normal(case.nodes, 8, 8), "att_src": case.normal(1, 8, 8),
               "att_dst": case.normal(1, 8, 8)}
    forward, backward = _attended(case, program, tensors)
    yield from (("additive", forward), ("additive_backward", backward))
    yield "additive_pmf", _attended(case, program, tensors, pmf=True)[0]


def _pairwise(case: Case) -> Iterator[tuple[str, float]]:
    program = attention_programs.dot_product(0.3, 0.0, False)
    tensors = {name: case.normal(case.nodes, 4, 16) for name in ("keys", "queries", "values")}
    forward, backward = _attended(case, program, tensors)
    yield from (("pairwise", forward), ("pairwise_backward", backward))


def _attended(case: Case, program, tensors: dict[str, Tensor],
              pmf: bool = False) -> tuple[float, float]:
    heads, width = tensors["x" if "x" in tensors else "keys"].shape[1:]
    fused = attention_programs.attention(program)
    assert fused is not None
    call = attention.Call(program, fused, case.view, heads, width, torch.float32, False, pmf)
    return _differentiated(case, tensors, lambda inputs: attention.run_cuda(call, inputs),
                           lambda inputs: torch_backend.plain(program, case.view.edges(), inputs))


Function = Callable[[dict[str, Any]], Tensor]


def _differentiated(case: Case, tensors: dict[str, Tensor], ours: Function,
                    exact: Function) -> tuple[float, float]:
    """Errors of the output of ``ours`` and of the worst of its gradients, against those of
    ``exact`` in fp64."""
    def results(run: Function, dtype: torch.dtype) -> list[Tensor]:
        inputs = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
        out = run(inputs)
        grad = torch.linspace(-1, 2, out.numel(), device=case.device,
                              dtype=torch.float32).view(out.shape).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, list(inputs.values()), grad)]

    found = [error(mine, truth) for mine, truth in zip(results(ours, torch.float32),
                                                       results(exact, torch.float64))]
    return found[0], max(found[1:])


def _operands(operation: str, left: Tensor, right: Tensor | None) -> operands.Operands:
    found = operands.prepare(operation, left, right)
    assert not isinstance(found, Reason)
    return found


def _run(call: OpCall) -> Tensor:
    assert not isinstance(call.kernel, Reason)
    return call.kernel.run()


def _operations(case: Case) -> Iterator[tuple[str, float]]:
    x, y, weight = (case.normal(case.nodes, 4, 16), case.normal(case.nodes, 4, 16),
                    case.normal(2000, 4, 1))
    for name, make in {
        "aggregate": lambda t: calls.gspmm(case.graph, _operands("mul", t(x), t(weight)), "sum"),
        "extremum": lambda t: calls.gspmm(case.graph, _operands("copy_lhs", t(x), None), "max"),
        "sddmm": lambda t: calls.gsddmm(case.graph, _operands("add", t(x), t(y)), ("u", "v")),
        "edge_softmax": lambda t: calls.edge_softmax(case.graph, t(weight.squeeze(-1)), "v"),
    }.items():
        got, exact = _run(make(lambda t: t)), make(lambda t: t.double()).plain()
        finite = torch.isfinite(exact)  # the maximum over no edges is -inf
        yield name, error(torch.where(finite, got, 0.0), torch.where(finite, exact, 0.0))


def _edge_list(case: Case) -> Iterator[tuple[str, float]]:
    x, weight, count = (case.normal(case.nodes, 64), case.normal(2000),
                        torch.zeros(case.nodes, dtype=torch.float32, device=case.device))
    got = edge_list.add_edges(case.edge_index, 0, x, case.nodes, weight, None, count)
    edge_list.average(got, count, torch.int64)
    degree = torch.bincount(case.dst, minlength=case.nodes).clamp(min=1).double()
    exact = torch.zeros_like(x).double().index_add(0, case.dst,
                                                   x[case.src].double()
                                                   * weight.double().unsqueeze(1))
    yield "edge_list", error(got, exact / degree.unsqueeze(1))


def _segments(case: Case) -> Iterator[tuple[str, float]]:
    ends = torch.tensor([0, 0, 31, 200, 201, 300], device="cpu")
    segments, spans = Segments(ends.to(case.device, torch.int32), 300), ends.diff().tolist()

    def each(rows: Tensor, others: Iterable[Tensor]) -> list[Tensor]:
        """Products in fp64, segment by segment."""
        return [part.double() @ other.double() for part, other in zip(rows.split(spans), others)]

    for name, k in (("segment_direct", 64), ("segment_gemm", 33)):
        x, w = case.normal(300, k), case.normal(5, k, 64)
        got = segment_gemm.multiply(segments, x, w)
        yield name, error(got, torch.cat(each(x, w)))  # type: ignore[arg-type]
    x, dy, w = case.normal(300, 64), case.normal(300, 32), case.normal(5, 64, 32)
    exact = torch.stack([part.double().T @ other.double()
                         for part, other in zip(x.split(spans), dy.split(spans))])
    yield "segment_gemm_grad", error(segment_gemm_grad.weight_grad(segments, x, dy).squeeze(1),
                                     exact)
    d_x, d_w, _ = segment_backward.gradients(segments, x, dy, w)
    yield "segment_backward", max(error(d_x, torch.cat(each(dy, w.transpose(1, 2)))),
                                  error(d_w.squeeze(1), exact))


def _blend_grad(case: Case) -> Iterator[tuple[str, float]]:
    ends = torch.tensor([0, 0, 120, 300], device="cpu")
    grad, rest, share = case.normal(300, 40), case.normal(300, 40), case.normal(3)
    d_rest = torch.empty_like(grad)
    sums = blend_grad.blend_grad(Segments(ends.to(case.device, torch.int32), 300), grad, rest,
                                 share, d_rest=d_rest)
    exact = torch.stack([part.sum()
                         for part in (grad.double() * rest.double()).split(ends.diff().tolist())])
    kept = 1 - share.double().repeat_interleave(ends.diff().to(case.device))
    yield "blend_grad", max(error(sums, exact), error(d_rest, kept.unsqueeze(1) * grad.double()))


def _of_layers(case: Case) -> Iterator[tuple[str, float]]:
    edges, nodes = len(case.dst), case.nodes
    for family, reduce, rows in (
            ("gated", "gated", dict(left=nodes, right=nodes, edge=edges, values=nodes)),
            ("outer_sum", outer_sums.Form(True, 24, True, 8).name, dict(x=nodes, edge=edges))):
        tensors = {name: case.normal(count, 24) for name, count in rows.items()}

        def by(way: Callable, reduce: str = reduce) -> Function:
            return lambda inputs: torch.cat([*way(case.graph, reduce, *inputs.values())])

        module = plain.operation(reduce)
        yield family, max(_differentiated(case, tensors, by(module.by_kernels),
                                          by(module.by_operations)))


def _messages(case: Case) -> Iterator[tuple[str, float]]:
    edges, nodes, softmax = len(case.dst), case.nodes, Softmax(0.7, True)  # type: ignore[call-arg]
    for family, reduce, more, rows, kernels in (
            ("gated_sum", "sum", Gated, dict(left=nodes, right=nodes, edge=edges),
             aggregation_messages),
            ("rectified", "sum", Rectified, dict(edge=edges), aggregation_messages),
            ("softmax_sum", softmax, Rectified, dict(edge=edges), aggregation_softmax)):
        tensors = {name: case.normal(count, 24) for name, count in {"x": nodes, **rows}.items()}

        def by(way: Callable, reduce: Any = reduce, more: type = more) -> Function:
            def run(inputs: dict[str, Any]) -> Tensor:
                others = {name: inputs[name] for name in inputs if name != "x"}
                return way(case.graph, Aggregation(reduce, inputs["x"], None, (24,),
                                                   more(**others)))

            return run

        yield family, max(_differentiated(case, tensors, by(kernels.run), by(aggregation.plain)))


def _multi_reduce(case: Case) -> Iterator[tuple[str, float]]:
    x = case.normal(case.nodes, 24)

    def call(inputs: dict[str, Tensor]) -> OpCall:
        return multi_reduce.multi_reduce(case.graph, inputs["x"], multi_reduce.REDUCES,
                                         inputs.get("weight"), added=inputs.get("added"))

    found = [_differentiated(case, {"x": x, name: case.normal(len(case.dst), *more)},
                             lambda inputs: _run(call(inputs)), lambda inputs: call(inputs).plain())
             for name, more in (("weight", ()), ("added", (24,)))]
    yield from zip(("multi_reduce", "multi_reduce_backward"), map(max, *found))


def _int8(case: Case) -> Iterator[tuple[str, float]]:
    whole = (case.normal(90, 40) * 30).round().clamp(-126, 126)
    whole[:, 0] = 127
    scale, off = case.normal(90, 1).abs(), case.normal(90, 40).clamp(-1, 1) / 4
    off[:, 0] = 0
    x = scale * (whole + off)
    rows = quantize.int8_rows(x)
    # rounded stochastically: to one of two neighbours
    narrow = quantize.bf16_rows(x, (1234, 5)).double()
    near = bool(((narrow - x.double()).abs() <= x.double().abs() / 128).all())
    yield "quantize", error(rows.dequantize(), scale.double() * whole) if near else float("inf")
    weight, bias = quantize.int8_rows(case.normal(33, 40)), case.normal(33)
    exact = rows.dequantize().double() @ weight.dequantize().double().T + bias
    yield "int8_gemm", error(int8_gemm.product(rows, weight, bias),  # type: ignore[arg-type]
                             exact)


def _tiles(case: Case) -> bool:
    rows = torch.randint(0, 200, (300,), device=case.device)
    ptr = torch.cat([rows.new_zeros(1), rows.cumsum(0)]).int()
    made = tile_ptr.tile_ptr(ptr)
    return all(torch.equal(found[1:].long(), (-(-rows // height)).cumsum(0)) and not found[0]
               for height, found in made.items())


def _joins(case: Case) -> bool:
    parts = [torch.randint(0, 7, (2, edges), device=case.device) for edges in (5, 0, 300)]
    made = join.join(parts, [(at, 7 * at, 7, 7 * at, 7) for at in range(3)], case.device)
    relation = torch.tensor([0, 2], device=case.device).repeat_interleave(
        torch.tensor([5, 300], device=case.device))
    src, dst = torch.cat(parts, 1) + 7 * relation
    return all(torch.equal(got.long(), expected)
               for got, expected in zip(made, (src, dst, relation))) and int(made.wrong) == 6


#: each check with the families whose verdicts it yields, in that order
CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (("structure", "row_split", "row_order"), _structure), (("pairs",), _pairs),
    (("gather",), _gather), (("dropout",), _dropout), (("head_dot",), _head_dot),
    (("column_sum",), _column_sum), (("adam",), _adam), (("host_rows",), _host_rows),
    (("additive", "additive_backward", "additive_pmf"), _additive),
    (("pairwise", "pairwise_backward"), _pairwise),
    (("aggregate", "extremum", "sddmm", "edge_softmax"), _operations),
    (("edge_list",), _edge_list),
    (("segment_direct", "segment_gemm", "segment_gemm_grad", "segment_backward"), _segments),
    (("blend_grad",), _blend_grad), (("gated", "outer_sum"), _of_layers),
    (("gated_sum", "rectified", "softmax_sum"), _messages),
    (("multi_reduce", "multi_reduce_backward"), _multi_reduce),
    (("quantize", "int8_gemm"), _int8))


def verdicts(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """(family, right?, what was found) of every family. A kernel that does not compile or launch is
    a finding, not an error."""
    case = None
    for families, check in CHECKS:
        left = list(families)
        try:
            case = case or Case(device)
            for family, found in check(case):
                left.remove(family)
                text = f"relative error {found:.1e}, allowed {TOLERANCE:.0e}"
                yield family, found <= TOLERANCE, text
        except driver.CompileError as problem:
            for family in left:
                yield family, False, f"did not compile: {_first_line(problem)}"
        except Exception as problem:  # noqa: BLE001 - what else goes wrong is asked for
            for family in left:
                yield family, False, f"{type(problem).__name__}: {_first_line(problem)}"


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0] or "no message"
