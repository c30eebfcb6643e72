"""The doctor's checks of kernels: they pass where kernels are right, cover every family, and notice
what is wrong."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.runtime import driver, sources
from gnnaccel.cuda.traverse import column_sum
from gnnaccel.profile.doctor import kernels


@pytest.mark.long
def test_every_family_is_right(device):
    found = list(kernels.verdicts(device))
    assert [name for name, right, _ in found if not right] == [], found
    assert sorted(name for name, _, _ in found) == sources.families()


@pytest.mark.long
def test_a_wrong_number_is_noticed(device, monkeypatch):
    true = column_sum.column_sum
    monkeypatch.setattr(column_sum, "column_sum", lambda x: true(x) * 1.001)
    wrong = {name: text for name, right, text in kernels.verdicts(device) if not right}
    assert list(wrong) == ["column_sum"] and "relative error 1.0e-03" in wrong["column_sum"]


@pytest.mark.parametrize("error, text",
                         [(driver.CompileError("no such thing\nmore"),
                           "did not compile: no such thing"),
                          (RuntimeError("an illegal address\n..."),
                           "RuntimeError: an illegal address")])
def test_a_kernel_that_fails_is_named_and_the_others_are_checked(device, monkeypatch, error, text):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(kernels.segment_gemm, "multiply", fail)
    found = {name: (right, said) for name, right, said in kernels.verdicts(device)}
    bad = {name for name, (right, _) in found.items() if not right}
    assert bad == {"segment_direct", "segment_gemm", "segment_gemm_grad", "segment_backward"}
    assert all(found[name][1] == text for name in bad)
    assert sorted(found) == sources.families()


def test_numbers_that_are_not_finite_are_wrong():
    assert kernels.error(torch.tensor([float("nan"), 1.0]), torch.ones(2)) == float("inf")
