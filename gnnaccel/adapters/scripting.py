"""`torch.jit.script` reads the source of the functions that it compiles; while it runs, everything
that hosts' adapters have replaced is as it was."""
from __future__ import annotations

import functools
import threading
from typing import Any

from gnnaccel import adapters
from gnnaccel.adapters.patching import PatchSet

_scripting = threading.RLock()


def install(patches: PatchSet) -> None:
    """Wrap `torch.jit.script`, through ``patches``."""
    import torch

    patches.set(
        torch.jit, "script", _unwrapped_while(torch.jit.script),
        "Puts the hosts' and users' own functions back while `torch.jit.script` compiles: it reads "
        "the source of what it compiles, and would read gnnaccel's. Then it calls torch's own "
        "function.",
        active="During each call of `torch.jit.script` while gnnaccel is enabled, in all threads: "
               "layers that another thread calls meanwhile run natively.",
        cost="About 0.1 ms per call of `torch.jit.script`. What was compiled runs the code as it "
             "was written.")


def _unwrapped_while(script: Any) -> Any:
    """``script`` with the originals back. The names in a class that it is given are looked up
    ``_frames_up`` calls above it, and one call of ours is in between."""

    @functools.wraps(script)
    def wrapped(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any,
                **kwargs: Any) -> Any:
        with _scripting, adapters.aside():
            return script(obj, optimize, _frames_up + 1, *args, **kwargs)

    return wrapped
