"""The CPU's operations against the plain interpreter: values, first and second derivatives, odd
graphs."""
from __future__ import annotations

import threading
import warnings

import pytest
import torch

from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.run import torch_backend, torch_pairs, torch_segments
from gnnaccel.dispatch.run.torch_backend import Edges
from gnnaccel.dispatch.run.torch_segments import Segments

CASES = ("gat", "gat pair", "gat edge", "gat no dst", "terms", "terms edge", "terms no dst",
         "gatv2", "gatv2 shared", "dot", "cosine", "mx", "sd")


def case(name: str, num_src: int, num_dst: int, edges: int, heads: int, width: int, dropout: float,
         dtype=torch.float64):
    """(Program, tensors that want gradients). Same-node layers need num_src == num_dst."""
    def rand(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    rows = rand(num_src, heads, width)
    other = rand(num_dst, heads, width)
    if name.startswith("gat") and not name.startswith("gatv2"):
        tensors = dict(x=rows, att_src=rand(1, heads, width))
        if name != "gat no dst":
            tensors["att_dst"] = rand(1, heads, width)
        if name == "gat pair":
            tensors["x_dst"] = other
        if name == "gat edge":
            tensors["a_edge"] = rand(edges, heads)
        return programs.gat(0.2, dropout, name != "gat pair", name != "gat no dst",
                            name == "gat edge"), tensors
    if name.startswith("terms"):
        tensors = dict(x=rows, a_src=rand(num_src, heads))
        if name != "terms no dst":
            tensors["a_dst"] = rand(num_dst, heads)
        if name == "terms edge":
            tensors["a_edge"] = rand(edges, heads)
        return programs.additive_terms(0.2, dropout, name != "terms no dst",
                                       name == "terms edge"), tensors
    tensors = dict(keys=rows, queries=rows if name in ("gatv2 shared", "sd") else other)
    if name.startswith("gatv2"):
        return programs.gatv2(0.2, dropout, False), dict(tensors, att=rand(1, heads, width))
    if name == "dot":
        return programs.dot_product(0.3, dropout,
                                    False), dict(tensors, values=rand(num_src, heads, width + 1))
    if name == "cosine":
        return programs.cosine(), dict(tensors, c_src=rand(num_src, heads))
    if name == "mx":
        return programs.supergat_mx(0.2, dropout), dict(tensors, c_src=rand(num_src, heads),
                                                        c_dst=rand(num_dst, heads))
    return programs.supergat_sd(0.3, 0.2, dropout), tensors


def random_edges(num_src: int, num_dst: int, count: int, isolated: int = 2) -> Edges:
    """Few nodes for many edges, so duplicates occur; the last ``isolated`` destinations have no
    edge."""
    dst = torch.randint(0, num_dst - isolated, (count,)).sort().values
    return Edges(torch.randint(0, num_src, (count,)), dst, torch.randperm(count), num_dst)


def leaves(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors.values()}.values())


@pytest.fixture(params=["folded", "head by head"], autouse=True)
def way(request, monkeypatch):
    torch.manual_seed(7)
    monkeypatch.setattr(torch_segments, "FOLD", 1 << 17 if request.param == "folded" else 0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("heads, width", [(1, 7), (3, 4), (2, 16)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_plain_path(name, heads, width, dropout):
    count, keep = 40, None
    edges = random_edges(9, 9, count)
    program, tensors = case(name, 9, 9, count, heads, width, dropout)
    assert torch_segments.covers(programs.attention(program), edges, tensors)
    if any(op.kind == "dropout" for op in program.ops):
        keep = (torch.rand(count, heads) > 0.5).double() * 2
    ours, theirs = torch_backend.run(program, edges, tensors,
                                     keep), torch_backend.plain(program, edges, tensors, keep)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    for mine, its in zip(*(torch.autograd.grad(out, leaves(tensors), grad)
                           for out in (ours, theirs))):
        torch.testing.assert_close(mine, its)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name):
    edges = random_edges(5, 5, 9)
    program, tensors = case(name, 5, 5, 9, 2, 3, 0.0)
    wanted = leaves(tensors)

    def function(*values):
        given = {id(leaf): value for leaf, value in zip(wanted, values)}
        return torch_backend.run(program, edges, {key: given[id(t)] for key, t in tensors.items()})

    assert torch.autograd.gradcheck(function, wanted)
    assert torch.autograd.gradgradcheck(function, wanted)


@pytest.mark.parametrize("name", CASES)
def test_bipartite_float32(name):
    if name in ("gat", "gat edge", "gatv2 shared", "sd"):
        pytest.skip("sources are destinations here")
    edges = random_edges(13, 6, 50)
    program, tensors = case(name, 13, 6, 50, 2, 5, 0.0, torch.float32)
    torch.testing.assert_close(torch_backend.run(program, edges, tensors),
                               torch_backend.plain(program, edges, tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_halves_have_the_digits_of_halves(name):
    """Neighbours that nearly agree: what scores get is a small difference of large numbers."""
    edges = random_edges(9, 9, 40)
    program, tensors = case(name, 9, 9, 40, 2, 16, 0.0)
    with torch.no_grad():
        for key in {"x", "keys", "values"} & set(tensors):
            tensors[key] += 30.0
        for t in leaves(tensors):
            t.copy_(t.bfloat16())
    grad = torch.randn(9, 2, 17 if name == "dot" else 16).bfloat16()

    def gradients(dtype):
        given = {id(t): t.detach().to(dtype).requires_grad_() for t in leaves(tensors)}
        out = torch_backend.run(program, edges, {key: given[id(t)] for key, t in tensors.items()})
        assert out.dtype is dtype
        return [g.double() for g in torch.autograd.grad(out, list(given.values()), grad.to(dtype))]

    for half, single, exact in zip(*map(gradients, (torch.bfloat16, torch.float32, torch.float64))):
        assert (half - exact).norm() <= 1e-2 * exact.norm() + 2 * (single - exact).norm()


def test_nodes_without_edges_get_zeros():
    edges = random_edges(6, 6, 12, isolated=3)
    program, tensors = case("dot", 6, 6, 12, 2, 4, 0.0)
    assert not torch_backend.run(program, edges, tensors)[-3:].any()


def test_large_scores_do_not_overflow():
    edges = random_edges(6, 6, 30)
    program, tensors = case("dot", 6, 6, 30, 2, 4, 0.0, torch.float32)
    tensors = {name: t.detach() * (1e3 if name != "values" else 1) for name, t in tensors.items()}
    torch.testing.assert_close(torch_backend.run(program, edges, tensors),
                               torch_backend.plain(program, edges, tensors))


@pytest.mark.parametrize("name", [name for name in CASES if "edge" not in name and name != "sd"])
def test_neighbours_that_are_all_the_same_leave_scores_without_gradient(name):
    """However large the features, and however many times an edge is there: what is left is no
    rounding of the features' size."""
    times = torch.tensor([1, 9, 3, 4, 7, 1, 13])
    dst = torch.arange(7).repeat_interleave(times)
    edges = Edges(torch.randint(0, 7, (7,)).repeat_interleave(times), dst, torch.arange(38), 7)
    program, tensors = case(name, 7, 7, 38, 2, 4, 0.0, torch.float32)
    rows = next(tensors[key] for key in ("values", "x", "keys") if key in tensors)
    with torch.no_grad():
        rows.mul_(1e3)
    out = torch_backend.run(program, edges, tensors)
    scores = [t for t in leaves(tensors) if t is not rows]
    size = (rows.abs().max() * out.abs().max() * 38).item()
    for found in torch.autograd.grad(out.square().sum() / 2, scores):
        assert found.abs().max() <= 1e-11 * size * max(t.abs().max().item()
                                                       for t in leaves(tensors))


def test_blocks_make_no_difference(monkeypatch):
    edges = random_edges(40, 40, 1500)
    program, tensors = case("gatv2", 40, 40, 1500, 2, 8, 0.0)
    found = []
    for size in (1 << 30, 1):
        monkeypatch.setattr(torch_pairs, "BLOCK_BYTES", size)
        out = torch_backend.run(program, edges, tensors)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves(tensors))])
    for one, many in zip(*found):
        torch.testing.assert_close(one, many)


def test_what_is_not_covered_takes_the_plain_path():
    program, tensors = case("dot", 5, 5, 9, 1, 3, 0.0)
    attention, edges = programs.attention(program), random_edges(5, 5, 9)
    none = torch.empty(0, dtype=torch.int64)
    assert not torch_segments.covers(attention, Edges(none, none, None, 5), tensors)
    assert not torch_segments.covers(attention, edges,
                                     {k: t.bfloat16() for k, t in tensors.items()})
    assert not torch_segments.covers(attention, edges, dict(tensors, keys=tensors["keys"].float()))
    assert not torch_segments.covers(None, edges, tensors)
    # as wide as the values
    assert torch_backend.run(program, Edges(none, none, None, 5), tensors).shape == (5, 1, 4)
    with torch.autograd.forward_ad.dual_level():
        assert not torch_segments.covers(attention, edges, tensors)


def test_no_warning_reaches_the_user():
    edges = random_edges(5, 5, 9)
    program, tensors = case("dot", 5, 5, 9, 1, 3, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_backend.run(program, edges, tensors).sum().backward()


def test_without_mkl(monkeypatch):
    edges = random_edges(5, 5, 9)
    program, tensors = case("dot", 5, 5, 9, 2, 3, 0.0)
    before = torch_backend.run(program, edges, tensors)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    torch.testing.assert_close(torch_backend.run(program, edges, tensors), before)


def test_turning_twice_gives_the_graph_back():
    edges = random_edges(9, 7, 30)
    graph = Segments.of(edges.src, edges.dst, 9, 7)
    there, back = graph.turned, graph.turned.turned
    assert torch.equal(there.dst,
                       there.dst.sort().values) and torch.equal(edges.src[there.place], there.dst)
    assert torch.equal(back.ptr, graph.ptr)
    assert sorted(zip(back.src.tolist(),
                      back.dst.tolist())) == sorted(zip(graph.src.tolist(), graph.dst.tolist()))
    assert edges.segments(9) is edges.segments(9) and edges.nbytes() > edges.src.nbytes


def sparse_graph() -> Segments:
    torch.manual_seed(0)
    return Segments.of(torch.randint(0, 9, (30,)), torch.randint(0, 7, (30,)).sort()[0], 9, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_without_weights_is_that_with_ones(dtype):
    graph, found = sparse_graph(), []
    rows, up = torch.randn(9, 5, dtype=dtype, requires_grad=True), torch.randn(7, 5, dtype=dtype)
    for weight in (None, torch.ones(30, dtype=dtype)):
        out = torch_segments.weighted_sum(graph, weight, rows)
        found.append((out, *torch.autograd.grad((out * up).sum(), rows)))
    assert all(torch.equal(one, other) for one, other in zip(*found))
    if dtype is torch.float64:
        assert torch.autograd.gradgradcheck(
            lambda t: torch_segments.weighted_sum(graph, None, t.sin()), rows)


@pytest.mark.parametrize("trained", [False, True])
def test_a_sum_keeps_its_rows_only_for_weights_that_want_a_gradient(trained):
    graph, kept = sparse_graph(), []
    rows, weight = torch.randn(9, 5, requires_grad=True), torch.rand(30).requires_grad_(trained)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch_segments.weighted_sum(graph, weight, rows)
    assert any(t.shape == rows.shape for t in kept) is trained


# ---- long rows ----

def ragged(degrees: list[int]) -> Segments:
    dst = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
    return Segments.of(torch.randint(50, dst.shape), dst, 50, len(degrees))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("degrees", [[0, 64, 65, 1, 128, 129, 0], [200], [0, 0, 64]], ids=str)
def test_sums_of_rows_in_parts(degrees, weighted):
    graph, rows = ragged(degrees), torch.randn(50, 3, requires_grad=True)
    weight = torch.rand(sum(degrees)) if weighted else None
    got, exact = torch_segments.weighted_sum(graph, weight, rows), rows.detach().double()
    w = torch.ones(sum(degrees)) if weight is None else weight

    def summed(x, at, to, count):
        return torch.zeros(count, 3).double().index_add(0, to, x[at] * w.double().view(-1, 1))

    torch.testing.assert_close(got.double(), summed(exact, graph.src, graph.dst, len(degrees)),
                               rtol=1e-6, atol=1e-5)
    grad = torch.randn_like(got)
    d_rows, = torch.autograd.grad(got, rows, grad)
    torch.testing.assert_close(d_rows.double(), summed(grad.double(), graph.dst, graph.src, 50),
                               rtol=1e-6, atol=1e-5)
    assert (graph.parts is None) is (max(degrees) <= torch_segments.PART)
    assert graph.nbytes() >= sum(t.nbytes for t in graph.parts or ())


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_hundreds_of_equal_numbers_keep_their_digits(weighted):
    """One after the other, they come out 1e-5 off."""
    graph, tenth = ragged([1000, 2]), torch.tensor(0.1)
    weight = tenth.expand(1002) if weighted else None
    rows = torch.ones(50, 4) if weighted else tenth.expand(50, 4)
    got = torch_segments.weighted_sum(graph, weight, rows)
    torch.testing.assert_close(got[0].double(), torch.full((4,), 1000 * float(tenth)).double(),
                               rtol=1.5e-6, atol=0)


def test_two_graphs_are_turned_side_by_side(monkeypatch):
    """A thread that turns one graph does not keep another one from its own; nor a forked process,
    for which the first would never end."""
    began, go, sort, results = threading.Event(), threading.Event(), torch.sort, []
    first = Segments.of(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), 3, 2)
    second = Segments.of(torch.tensor([2, 1, 0]), torch.tensor([0, 1, 1]), 3, 2)

    def waiting(ids, **options):
        if ids is first.src:
            began.set()
            assert go.wait(60)
        return sort(ids, **options)

    monkeypatch.setattr(torch, "sort", waiting)
    threads = [threading.Thread(target=lambda graph=graph: results.append(graph.turned))
               for graph in (first, second)]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    threads[1].join(5)
    alone = list(results)
    go.set()
    for thread in threads:
        thread.join()
    assert alone == [second.turned]
    assert first.turned is first.turned is results[1]
    assert first.turned.place.tolist() == [0, 1, 2] and second.turned.place.tolist() == [2, 1, 0]
