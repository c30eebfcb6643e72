"""When rows in fewer bytes pay, and which layer comes last where no model says so."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import cost, settings, use
from gnnaccel.dispatch.quantized.cost import Sizes
from gnnaccel.dispatch.quantized.measure import Stopwatch
from gnnaccel.dispatch.quantized.rows import Storage
from tests.routes import clean, one_thread  # noqa: F401

INT8, BF16 = Storage("int8", "int8"), Storage("bf16", "bf16")
REDDIT = Sizes(232_965, 232_965, 114_848_857, 128, 4, True)


def test_large_graphs_of_wide_rows_pay():
    assert cost.reason_against(REDDIT, INT8) is None and cost.reason_against(REDDIT, BF16) is None
    assert cost.gain(REDDIT, INT8) > cost.gain(REDDIT, BF16) > 1.2


@pytest.mark.parametrize("change, text", [
    (dict(num_src=2708, num_dst=2708, num_edges=10_556, channels=64), "3.9 times; converting it pays from 4"),
    (dict(num_src=10_000, num_dst=10_000, num_edges=60_000), "us in fp32"),  # a handful of launches
    (dict(num_edges=3 * 232_965), "3.0 times; converting it pays from 4"),
    (dict(channels=8), "8 channels")])
def test_what_does_not_pay(change, text):
    why = cost.reason_against(REDDIT._replace(**change), INT8)
    assert why.code == "GA604" and text in why.text


def test_gain_grows_with_degree_and_width():
    by_degree = [cost.gain(REDDIT._replace(num_edges=d * 232_965), INT8) for d in (4, 8, 50, 500)]
    by_width = [cost.gain(REDDIT._replace(channels=c), INT8) for c in (8, 16, 64, 128)]
    assert by_degree == sorted(by_degree) and by_width == sorted(by_width)
    # a quarter of the bytes, which may then fit a cache that is twice as fast
    assert by_degree[-1] < 8


def test_a_backward_in_fp32_gains_less():
    assert cost.gain(REDDIT, Storage("int8", "fp32")) < cost.gain(REDDIT, INT8)


def decided(sizes, route="cuda", when="profitable", dtype=torch.float32, unfit=None):
    layer = Layer()
    entry = settings.keep(layer, settings.Setting("layer", "int8", None, None))
    found = use.decide(layer, entry, Config(when=when), route, reason("GA301"), dtype, sizes, unfit)
    return found.code if isinstance(found, Reason) else found.text


def test_what_a_call_runs_in():
    small = Sizes(2708, 2708, 10_556, 64, 4, True)
    assert decided(REDDIT) == "int8" and decided(small) == "GA604" and decided(small, when="supported") == "int8"
    assert decided(REDDIT, route="torch") == "GA604", "torch operations only emulate"
    assert decided(REDDIT, route="native") == "GA607"
    assert decided(REDDIT,
                   dtype=torch.float64) == "GA603" and decided(REDDIT,
                                                               dtype=torch.float16) == "int8"
    assert decided(REDDIT, unfit=reason("GA303")) == "GA303"


@pytest.mark.parametrize("gain, code", [(1.3, "int8"), (0.8, "GA604")])
def test_what_was_measured_to_lose_runs_in_fp32(gain, code):
    layer = Layer()
    entry = settings.keep(layer, settings.Setting("layer", "int8", None, None))
    watch = Stopwatch(entry)

    def ran(when):
        found = settings.wanted(layer, entry, Config(when=when), False)
        return found.code if isinstance(found, Reason) else found.format

    for _ in range(2):
        watch.judge(gain)
        assert entry.measured == gain and ran("profitable") == code and ran("supported") == "int8"


# ---- the order ----

class Layer(torch.nn.Module):
    pass


def passes(layers, count=2, checkpointed=False):
    return [[getattr(settings.reason_against(layer, checkpointed), "code", None)
             for layer in layers]
            for _ in range(count)]


def test_the_first_pass_tells_the_last_layer():
    layers = [Layer() for _ in range(3)]
    assert passes(layers, 3) == [["GA606"] * 3, [None, None, "GA602"], [None, None, "GA602"]]


def test_a_layer_that_is_called_again_in_a_pass_counts_as_last():
    layer = Layer()
    assert passes([layer, layer], 2) == [["GA606", "GA602"], ["GA602", "GA602"]]


def test_a_last_layer_stays_so():
    first, second, third = (Layer() for _ in range(3))
    passes([first, second])
    passes([first, second, third], 3)
    assert settings.reason_against(second, False).code == "GA602", \
        "once last, never quantized without a model"


def test_nothing_is_learnt_from_calls_that_may_be_repeated():
    layers = [Layer() for _ in range(2)]
    assert passes(layers, 3, checkpointed=True) == [["GA606"] * 2] * 3
    passes(layers, 2)
    assert passes(layers, 2, checkpointed=True) == [[None, "GA602"]] * 2
