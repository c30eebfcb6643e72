"""Attention problems for the kernel tests: a graph, a Program and its inputs, run by the kernels
and by the torch backend."""
from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnaccel.cuda.traverse.dropout import factors
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir import attention_programs
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.run import attention, torch_backend
from tests.helpers import FLOOR, ROUNDING, relative

SIZES = [(8, 8), (1, 1), (1, 7), (3, 5), (5, 3), (2, 40), (1, 64), (1, 128), (12, 20), (40, 2),
         (2, 512), (1, 511)]


@dataclass
class Problem:
    program: Program
    graph: GraphView
    tensors: dict[str, Tensor]
    heads: int
    width: int
    out_dtype: torch.dtype = torch.float32
    pmf: bool = False
    exposed: bool = False
    grad: Tensor | None = field(default=None)

    def call(self) -> attention.Call:
        return attention.Call(self.program, attention_programs.attention(self.program), self.graph,
                              self.heads, self.width, self.out_dtype, self.exposed, self.pmf)

    def grad_out(self) -> Tensor:
        """A fixed gradient of the output."""
        if self.grad is None:
            shape = (self.graph.num_dst, self.heads, self.width)
            self.grad = torch.randn(shape).to(self.graph.device, self.out_dtype)
        return self.grad


def skewed_edges(num_src: int, num_dst: int, edges: int, device="cpu") -> Tensor:
    """Random edges with a long row on each side, rows of just 32 and 33 edges, duplicates, and
    isolated nodes (the last)."""
    src, dst = torch.randint(0, max(1, num_src - 1),
                             (edges,)), torch.randint(0, max(1, num_dst - 1), (edges,))
    hub = edges // 3
    dst[:hub] = min(3, num_dst - 1)
    src[hub // 2:hub + hub // 2] = min(5, num_src - 1)
    if edges >= 160 and num_dst > 8:
        dst[dst == 6], dst[dst == 7] = 4, 4
        dst[-32:], dst[-65:-32] = 6, 7
    order = torch.randperm(edges)
    return torch.stack([src[order], dst[order]]).to(device)


def graph(device, num_src=40, num_dst=30, edges=200, loops=0, wide=False) -> GraphView:
    view = GraphView(skewed_edges(num_src, num_dst, edges, device), num_src, num_dst, loops,
                     own=True)
    view.wide = wide
    return view


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def additive(view: GraphView, heads: int, width: int, terms="same", edge=False, dropout=0.0,
             slope=0.2, row=torch.float32, out=None, scale=1.0, pmf=False, bias=False) -> Problem:
    """GAT. ``terms``: "same" (destinations are sources), "bipartite" or "source" (no features of
    destinations)."""
    program = attention_programs.gat(slope, dropout, terms == "same", terms != "source", edge, bias)
    tensors = {"x": _normal(view.num_src, heads, width) * scale,
               "att_src": _normal(1, heads, width)}
    if terms == "bipartite":
        tensors["x_dst"] = _normal(view.num_dst, heads, width) * scale
    if terms != "source":
        tensors["att_dst"] = _normal(1, heads, width)
    if edge:
        tensors["a_edge"] = _normal(view.num_edges, heads)
    if bias:
        tensors["bias"] = _normal(heads * width)
    return _problem(program, view, tensors, heads, width, row, out, pmf)


def terms(view: GraphView, heads: int, width: int, dst=True, edge=False, dropout=0.0, slope=0.2,
          row=torch.float32, out=None, scale=1.0, pmf=False) -> Problem:
    """Additive attention over terms from elsewhere."""
    program = attention_programs.additive_terms(slope, dropout, dst, edge)
    tensors = {"x": _normal(view.num_src, heads, width) * scale,
               "a_src": _normal(view.num_src, heads)}
    if dst:
        tensors["a_dst"] = _normal(view.num_dst, heads)
    if edge:
        tensors["a_edge"] = _normal(view.num_edges, heads)
    return _problem(program, view, tensors, heads, width, row, out, pmf)


def pairwise(score: str, view: GraphView, heads: int, width: int, edge=False, dropout=0.0,
             slope=0.2, row=torch.float32, out=None, scale=1.0, bias=False) -> Problem:
    """One of gatv2, dot, cosine, mx, sd; ``edge`` for the first two, ``dropout`` for all but
    cosine, ``bias`` for gatv2."""
    size = scale * width**-0.25
    tensors = {"keys": _normal(view.num_src, heads, width) * size,
               "queries": _normal(view.num_dst, heads, width) * size}
    if score == "gatv2":
        program = attention_programs.gatv2(slope, dropout, edge, bias)
        tensors["att"] = _normal(1, heads, width)
        if bias:
            tensors["bias"] = _normal(heads * width)
    elif score == "dot":
        program = attention_programs.dot_product(0.7, dropout, edge)
        tensors["values"] = _normal(view.num_src, heads, width)
    elif score == "cosine":
        program = attention_programs.cosine()
        tensors["c_src"] = _normal(view.num_src, heads)
    elif score == "mx":
        program = attention_programs.supergat_mx(slope, dropout)
        tensors["c_src"], tensors["c_dst"] = _normal(view.num_src,
                                                     heads), _normal(view.num_dst, heads)
    else:
        program = attention_programs.supergat_sd(0.7, slope, dropout)
    if edge:
        tensors["edges"] = _normal(view.num_edges, heads, width) * size
    return _problem(program, view, tensors, heads, width, row, out)


def pairwise_vectors(device, heads: int, width: int, vectors: int = 3, dropout=0.0,
                     row=torch.float32) -> Problem:
    """GATv2 over several graphs side by side, one of them without edges, each with an attention
    vector of its own."""
    edges = [skewed_edges(20, 15, 90, device) + torch.tensor([[20], [15]], device=device) * i
             for i in range(vectors - 1)]
    view = GraphView(torch.cat(edges, 1), 20 * vectors, 15 * vectors, own=True)
    size = width**-0.25
    tensors = {"keys": _normal(view.num_src, heads, width) * size,
               "queries": _normal(view.num_dst, heads, width) * size,
               "att": _normal(vectors, heads, width)}
    found = _problem(attention_programs.gatv2_vectors(0.2, dropout), view, tensors, heads, width,
                     row, None)
    numbers = torch.arange(vectors, dtype=torch.int32, device=device)
    found.tensors.update(of_src=numbers.repeat_interleave(20), of_dst=numbers.repeat_interleave(15))
    return found


def _leaves(tensors: dict[str, Tensor], train: bool,
            dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors of floating point as leaves, in ``dtype``; the others as they are."""
    return {name: t.detach().to(dtype or t.dtype).requires_grad_(train)
            if t.is_floating_point() else t
            for name, t in tensors.items()}


def _gradients(out: Tensor, tensors: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    asked = {name: t for name, t in tensors.items() if t.is_floating_point()}
    return dict(zip(asked, torch.autograd.grad(out, list(asked.values()), grad)))


_ROWS = ("x", "x_dst", "keys", "queries", "values", "edges")


def _problem(program, view, tensors, heads, width, row, out, pmf=False) -> Problem:
    placed = {name: t.to(view.device, row if name in _ROWS else torch.float32)
              for name, t in tensors.items()}
    return Problem(program, view, placed, heads, width, out or row, pmf)


# ---- running ----

def by_kernels(problem: Problem, train: bool = True) -> tuple[dict[str, Tensor], attention.Call]:
    """The output ("out") and, under ``train``, the gradient of every input by its name."""
    call = problem.call()
    tensors = _leaves(problem.tensors, train)
    out = attention.run_cuda(call, tensors)
    results = {"out": out.detach()}
    if train:
        results.update(_gradients(out, tensors, problem.grad_out()))
    return results, call


def by_torch(problem: Problem, call: attention.Call, dtype: torch.dtype,
             train: bool = True) -> dict[str, Tensor]:
    """The same by plain torch operations in ``dtype``, with the dropout of ``call``."""
    tensors = _leaves(problem.tensors, train, dtype)
    out = plain(problem, tensors, mask_of(problem, call, dtype))
    results = {"out": out.detach()}
    if train:
        results.update(_gradients(out, tensors, problem.grad_out().to(dtype)))
    return results


def plain(problem: Problem, tensors: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
    """The output by plain torch operations."""
    if "bias" in tensors:
        tensors = {**tensors, "bias": tensors["bias"].view(problem.heads, problem.width)}
    return torch_backend.plain(problem.program, problem.graph.edges(), tensors, mask)


def mask_of(problem: Problem, call: attention.Call, dtype: torch.dtype) -> Tensor | None:
    """The dropout factors that the kernels drew in this call."""
    if not call.attention.dropout:
        return None
    edges = problem.graph.edges()
    return factors(call.dropout, edges.src.shape[0], problem.heads, problem.graph.device).to(dtype)


#: What a single sample of a gradient may be off by in any case: it leaves room for the luck of
#: torch's own rounding, most of
#: all where few numbers are compared. `check_average` judges without it.
GRADIENT_FLOOR = {"att_src": 3e-6, "att_dst": 3e-6, "att": 3e-6, "bias": 3e-6}


def check(problem: Problem, train: bool = True, floor: float = 0.0) -> dict[str, Tensor]:
    """The kernels' results, after judging each of them; the allowance grows by what storing in half
    precision costs.

    Where an error is beyond its limit, but not by far, the errors of twelve more draws are put
    together: torch's own error in a single one is luck, and differs from device to device."""
    got, found = _draw(problem, train)
    floors = {}
    for name, value in got.items():
        expected = problem.out_dtype if name == "out" else problem.tensors[name].dtype
        assert value.dtype == expected, f"{name} has {value.dtype}"
        assert torch.isfinite(
            value).all(), f"{name}: {int((~torch.isfinite(value)).sum())} numbers are not finite"
        stored = ROUNDING[value.dtype] if value.dtype in (torch.float16, torch.bfloat16) else 0.0
        floors[name] = max(floor,
                           FLOOR if name == "out" else GRADIENT_FLOOR.get(name, 1e-6)) + stored
    wrong = _beyond([found], floors)
    assert not _beyond([found], floors, 2.5), wrong
    if wrong:
        wrong = _beyond([found, *(_draw(_redrawn(problem), train)[1] for _ in range(SECOND_LOOK))],
                        floors)
        assert not wrong, wrong
    return got


SECOND_LOOK = 12


def _draw(problem: Problem,
          train: bool) -> tuple[dict[str, Tensor], dict[str, tuple[float, float, float]]]:
    """The kernels' results, and of each its error, torch's in fp32, and the truth's norm."""
    got, call = by_kernels(problem, train)
    exact, plain = (by_torch(problem, call, dtype, train)
                    for dtype in (torch.float64, torch.float32))
    return got, {name: (*((t.double() - exact[name]).norm().item() for t in (value, plain[name])),
                        exact[name].norm().item())
                 for name, value in got.items()}


def _beyond(draws: list[dict], floors: dict[str, float], slack: float = 1.0) -> list[str]:
    """What is less accurate over these draws than twice torch plus its floor."""
    wrong = []
    for name, floor in floors.items():
        mine, plain, scale = torch.tensor([draw[name] for draw in draws],
                                          dtype=torch.float64).pow(2).sum(0).sqrt().tolist()
        if not mine / (scale or 1.0) <= slack * (2 * plain / (scale or 1.0) + floor):
            wrong.append(f"{name}: relative error {mine / (scale or 1.0):.2e}, allowed "
                         f"{2 * plain / (scale or 1.0) + floor:.2e}")
    return wrong


def _redrawn(problem: Problem) -> Problem:
    """The same with other random numbers of the same size."""
    tensors = {name: (torch.randn(t.shape) * t.float().square().mean().sqrt().cpu()).to(t)
               if t.is_floating_point() else t
               for name, t in problem.tensors.items()}
    return replace(problem, tensors=tensors, grad=None)


def check_average(make) -> None:
    """Over a dozen of ``make()``, the root mean square of the kernels' errors against that of
    torch's in fp32."""
    errors: dict[str, list] = {}
    for _ in range(12):
        problem = make()
        got, call = by_kernels(problem)
        exact, plain = (by_torch(problem, call, dtype) for dtype in (torch.float64, torch.float32))
        for name in got:
            errors.setdefault(name,
                              []).append((relative(got[name], exact[name]),
                                          relative(plain[name], exact[name])))
    for name, pairs in errors.items():
        ours, torchs = torch.tensor(pairs, dtype=torch.float64).pow(2).mean(0).sqrt().tolist()
        assert ours <= 2 * torchs + FLOOR, f"{name}: error {ours:.2e} on average, {torchs:.2e} by torch in fp32"
