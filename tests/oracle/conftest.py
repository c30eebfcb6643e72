"""What the oracle's own tests share."""
from __future__ import annotations

import pytest


@pytest.fixture
def backend():
    """The CPU, as a run of the oracle has it."""
    from tests.oracle.backends import Backend

    found = Backend("cpu")
    with found.session():
        yield found
