"""That a checkpoint around a call is seen, in the call and in its repetition."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gnnaccel.dispatch.run import autograd
from gnnaccel.dispatch.run.autograd import by_disabling, checkpointed


@pytest.fixture(autouse=True, params=["torch's own", "by disabling"])
def told(request, monkeypatch):
    """Both ways to find out; torch 2.4 to 2.7 have the second alone."""
    if request.param == "by disabling":
        monkeypatch.setattr(autograd, "saved_tensor_hooks", by_disabling)


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


def test_asking_leaves_hooks_as_they_were():
    def enabled():
        return torch._C._autograd._saved_tensors_hooks_is_enabled()

    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert checkpointed() and enabled()
        torch.ones(2, requires_grad=True).sin()
    assert len(packed) == 1
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not checkpointed() and not enabled()
    assert enabled()
