"""``%load_ext gnnaccel`` in IPython and Jupyter.

Loading enables gnnaccel, unloading disables it. ``%%gnnaccel.profile`` and ``%%gnnaccel.compare``
at the head of a cell do for the cell what ``--profile`` and ``--compare`` do for a script. IPython
takes everything up to the first space for a magic's name, so a dot in it works; only ``%automagic``
and tab completion do without it. Nothing here imports IPython.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext gnnaccel``: enable gnnaccel, and register the cell magics with
    ``shell``."""
    from gnnaccel import session

    for name in ("profile", "compare"):
        shell.register_magic_function(_magic(shell, name), magic_kind="cell",
                                      magic_name=f"gnnaccel.{name}")
    session.enable()


def unload_ipython_extension(shell: Any) -> None:
    """Called by ``%unload_ext gnnaccel``: disable gnnaccel. The magics stay, and enable it for
    their cell only."""
    from gnnaccel import session

    session.disable()


def _magic(shell: Any, name: str) -> Callable[[str, str], None]:
    def run_cell(line: str, cell: str) -> None:
        from gnnaccel import session
        from gnnaccel.profile import observe

        if line.strip():
            raise ValueError(f"%%gnnaccel.{name} takes no arguments, got {line.strip()!r}")
        with session.enabled():
            observer = observe.start(profile=name == "profile", compare=name == "compare",
                                     report=None)
            try:
                shell.run_cell(cell)
            finally:
                observe.finish(observer)

    run_cell.__doc__ = (f"Run the cell with gnnaccel enabled, then show what ``--{name}`` shows of "
                        "a script.")
    return run_cell
