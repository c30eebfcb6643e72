"""The segment GEMM suite: that every way multiplies the same, and what is written down."""
from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

pytest.importorskip("torch_geometric")

from gnnaccel.__main__ import main
from gnnaccel.profile.bench import result, suite_segment, timing
from gnnaccel.profile.bench.plan import Plan

CPU = torch.device("cpu")
TINY = suite_segment.SHAPES["tiny 16"]


def by_rows(case, x, w):
    """Row by row, straight from the definition."""
    segment = torch.bucketize(torch.arange(case.shape.rows), case.ptr[1:], right=True)
    return torch.einsum("ri,rio->ro", x, w[segment])


def weights_by_rows(case):
    segment = torch.bucketize(torch.arange(case.shape.rows), case.ptr[1:], right=True)
    outer = case.x[:, :, None] * case.grad[:, None, :]
    return torch.zeros_like(case.w).index_add_(0, segment, outer)


@pytest.fixture
def case():
    return suite_segment.make(TINY, torch.float32, CPU)


@pytest.fixture
def plan():
    return Plan(((TINY, ("fp32",)),), device=CPU, effort=timing.QUICK)


@pytest.mark.parametrize("name", suite_segment.SHAPES)
def test_shapes_have_their_rows_and_segments(name):
    shape = suite_segment.SHAPES[name]
    sizes = suite_segment._sizes(shape)
    assert int(sizes.sum()) == shape.rows and len(sizes) == shape.segments
    assert suite_segment.resolve(name.replace(" ", "").upper()) is shape


def test_bounds_are_the_pointer(case):
    assert list(case.bounds) == case.ptr.tolist()
    assert case.bounds[0] == 0 and case.bounds[-1] == TINY.rows and len(
        case.bounds) == TINY.segments + 1
    sizes = case.ptr.diff()
    assert bool((sizes.diff() > 0).any()) and bool(
        (sizes.diff() < 0).any()), "segments come sorted by size"


def test_loop_multiplies_and_differentiates(case):
    forward, training = suite_segment.loop(case, "fp32")
    assert torch.allclose(forward(), by_rows(case, case.x, case.w), atol=1e-5)
    out, x_grad, w_grad = training()
    assert torch.allclose(out, forward())
    assert torch.allclose(x_grad, by_rows(case, case.grad, case.w.transpose(1, 2)), atol=1e-5)
    assert torch.allclose(w_grad, weights_by_rows(case), atol=1e-4)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"),
                    reason="this torch has no grouped_mm")
def test_grouped_multiplies_and_differentiates():
    case = suite_segment.make(TINY, torch.bfloat16, CPU)
    for ours, theirs in zip(suite_segment.grouped(case, "bf16")[1](),
                            suite_segment.loop(case, "bf16")[1]()):
        assert torch.allclose(ours.float(), theirs.float(), rtol=0.05, atol=0.05)


def test_dense_does_as_many_flops(case):
    out, x_grad, w_grad = suite_segment.dense(case, "fp32")[1]()
    assert out.shape == x_grad.shape == case.x.shape and w_grad.shape == case.w.shape[1:]


def test_empty_segments_are_left_alone(case):
    bounds = (0, 0, *case.bounds[1:-1], TINY.rows, TINY.rows)
    wider = dataclasses.replace(case, bounds=bounds, w=torch.cat([case.w[:1], case.w, case.w[:1]]))
    assert torch.isfinite(suite_segment.loop(wider, "fp32")[1]()[2]).all()


def test_our_kernels_are_asked_for_on_a_gpu_only():
    assert not suite_segment.available("gnnaccel", "fp32", CPU)
    assert suite_segment.available("gnnaccel", "fp32", torch.device("cuda"))
    assert not suite_segment.available("grouped_mm", "fp32", torch.device("cuda"))


@pytest.fixture
def emulated():
    if shutil.which("g++") is None:
        pytest.skip("the emulation needs g++")
    from gnnaccel.cuda.runtime import driver
    from tests.emulation.emulator import EmulatedDriver

    with driver.using(EmulatedDriver()):
        yield


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-5), ("tf32", 1e-2), ("bf16", 2e-2)])
def test_our_kernels_multiply_and_differentiate(precision, tolerance, emulated):
    case = suite_segment.make(TINY, suite_segment.PRECISIONS[precision], CPU)
    exact = dataclasses.replace(case, x=case.x.float(), w=case.w.float(), grad=case.grad.float())
    forward, training = suite_segment.gnnaccel(case, precision)
    theirs = suite_segment.loop(exact, "fp32")[1]()
    assert relative(forward().float(), theirs[0]) < tolerance
    for ours, wanted in zip(training(), theirs):
        assert relative(ours.float().view_as(wanted), wanted) < tolerance


def relative(ours, theirs):
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


def test_a_wrong_product_shows_in_the_record(plan, case, monkeypatch):
    def wrong(case, precision):
        return lambda: 3 * by_rows(case, case.x, case.w), lambda: None

    monkeypatch.setattr(suite_segment, "available", lambda *_: True)
    monkeypatch.setattr(suite_segment, "CALLS", {"gnnaccel": wrong})
    forward, training = suite_segment.case_records(plan, TINY, "fp32", bandwidth=1e9)
    assert (forward.mode, forward.error, training.mode,
            training.error) == ("forward", None, "training", None)
    assert forward.values["rel_l2"] == pytest.approx(2, rel=1e-3)


def test_floor_counts_operands_and_results_once(case):
    rows, weights = 600 * 16 * 4, 12 * 16 * 16 * 4
    assert suite_segment.moved_bytes(case, "forward") == 2 * rows + weights
    assert suite_segment.moved_bytes(case, "training") == 3 * (2 * rows + weights)


def test_tf32_is_put_back():
    before = torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(RuntimeError), suite_segment._allowed_tf32(not before):
        assert torch.backends.cuda.matmul.allow_tf32 is not before
        raise RuntimeError
    assert torch.backends.cuda.matmul.allow_tf32 is before


@pytest.mark.long
def test_quick_run_measures_and_reports(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert main(["bench", "--suite", "segment-gemm", "--quick", "--device", "cpu", "--out",
                 str(out), "--table", "markdown"]) == 0
    made = result.load(out)
    assert {(r.layer, r.impl) for r in made.records} >= {("fp32", "loop"), ("fp32", "dense"),
                                                         ("bf16", "grouped_mm")}
    assert all(r.kind == "segment-gemm" and r.values["floor_ms"] > 0 for r in made.records)
    assert all(r.ms > 0 for r in made.records if r.impl in ("loop", "dense"))
    assert "| tiny 16 | bf16 | training |" in capsys.readouterr().out


@pytest.mark.parametrize("options",
                         [["--shapes", "nosuch"], ["--layers", "nosuch"], ["--parts", "nosuch"]])
def test_unknown_names_are_an_error_not_a_trace(options, capsys):
    assert main(["bench", "--suite", "segment-gemm", "--quick", "--device", "cpu", *options]) == 2
    assert "nosuch" in capsys.readouterr().err
