"""Which of gnnaccel's functions Dynamo looks at."""
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

from torch._dynamo import convert_frame

_OURS = "gnnaccel/adapters/", "gnnaccel/dispatch/"


@contextlib.contextmanager
def frames() -> Iterator[set[str]]:
    """The names of gnnaccel's functions that Dynamo compiles as frames of their own in a block."""
    seen: set[str] = set()
    native = convert_frame._compile

    def compiled(code, *args, **kwargs):
        if any(folder in code.co_filename for folder in _OURS):
            seen.add(code.co_name)
        return native(code, *args, **kwargs)

    with mock.patch.object(convert_frame, "_compile", compiled), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Dynamo cannot trace
        yield seen
