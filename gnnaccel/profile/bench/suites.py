"""The suites by name: how each makes its plan of the options, and what runs it."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from gnnaccel.profile.bench import (script_plan, suite_aggregate, suite_attention, suite_dgl,
                                    suite_peers, suite_quantized, suite_relational, suite_scripts,
                                    suite_segment)
from gnnaccel.profile.bench.guard import Budget
from gnnaccel.profile.bench.result import Record


@dataclasses.dataclass(frozen=True)
class Suite:
    """``plan`` makes what ``run`` takes first. It raises ValueError on options that mean nothing to
    the suite."""

    plan: Callable[[Any], Any]
    run: Callable[[Any, Budget], Iterator[Record]]


SUITES = {
    "attention": Suite(suite_attention.from_options, suite_attention.attention),
    "attention-kernel": Suite(suite_attention.from_options, suite_attention.attention_kernel),
    "relational": Suite(suite_relational.from_options, suite_relational.relational),
    "dgl": Suite(suite_dgl.from_options, suite_dgl.dgl),
    "quantized": Suite(suite_quantized.from_options, suite_quantized.quantized),
    "aggregate": Suite(suite_aggregate.from_options, suite_aggregate.aggregate),
    "peers": Suite(suite_peers.from_options, suite_peers.peers_suite),
    "scripts": Suite(script_plan.from_options, suite_scripts.scripts),
    "segment-gemm": Suite(suite_segment.from_options, suite_segment.segment_gemm),
}
