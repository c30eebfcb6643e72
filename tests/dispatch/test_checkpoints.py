"""That a checkpoint around a call is seen, in the call and in its repetition."""
from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from gnnaccel.dispatch.memory.checkpoints import checkpointed


def test_seen_inside_and_in_the_repetition():
    seen = []

    def call(x):
        seen.append(checkpointed())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    call(x)
    checkpoint(call, x, use_reentrant=False).sum().backward()
    assert seen == [False, True, True] and not checkpointed()


def test_hooks_of_a_script_count_as_one():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert checkpointed()
    assert not checkpointed()
