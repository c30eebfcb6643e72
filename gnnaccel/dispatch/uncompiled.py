"""Functions of gnnaccel's own that torch.compile leaves alone, and those that it keeps apart.

A wrapper that Dynamo traces gives it the host's function. Where Dynamo gives a frame up, after a
graph break say, Python runs the wrapper, and Dynamo looks at each function that is called from
there. Functions that decide a call must then run as they are written: compiled, they would remember
the state while a compiler traces as the process's state.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = eval_frame
# not in torch before 2.7, which compiles these functions like any others
_KNOWN = hasattr(_frames, "set_code_exec_strategy")


def uncompiled(function: _Function) -> _Function:
    """The function itself, marked: where Python calls it, Dynamo lets it run, with all it calls.

    The mark is on its code: a call costs nothing more. Functions made by one ``def`` share it. Code
    that Dynamo traces is not changed.
    """
    if _KNOWN:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function


def untraced(function: _Function) -> _Function:
    """The function itself, marked: Dynamo breaks the graph at it, and it runs as `uncompiled`.

    For code that compiled autograd would trace: the backward of nodes that run kernels.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable
    return uncompiled(function)


def kept_apart(function: _Function) -> _Function:
    """The function itself, with a code object of its own.

    Dynamo keeps its results by code, and whether it has given up: of functions made by one ``def``
    it would give up all with the first.
    """
    function.__code__ = function.__code__.replace()
    return function
