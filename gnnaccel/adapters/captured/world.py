"""Functions that act on the world or read it, by their names, and operators that a user wrote."""
from __future__ import annotations

import sys
from typing import Any

from torch import library

from gnnaccel.adapters.captured.values import Unknown

#: functions that act on the world, or read it, which a replay would not
ACTING = frozenset(("print", "input", "open", "exec", "eval", "breakpoint", "globals", "setattr",
                     "delattr", "__import__"))
CHANGING_MODULES = frozenset(("time", "datetime", "logging", "warnings", "io", "socket", "secrets",
                               "subprocess", "threading", "uuid", "wandb", "tqdm", "importlib",
                               "pathlib", "shutil", "tempfile", "sqlite3", "queue", "asyncio",
                               "multiprocessing", "concurrent", "psutil", "traceback"))
#: names in modules that stand for the world, or for generators with new seeds
OF_THE_WORLD = {
    "sys": {"modules", "stdout", "stderr", "stdin", "_getframe"},
    "inspect": {"currentframe", "stack"}, "random": {"Random", "SystemRandom", "seed", "setstate"},
    "os": {"urandom", "exists", "isfile", "isdir", "getmtime", "listdir", "scandir", "system"},
    "numpy": {"default_rng", "RandomState", "SeedSequence", "PCG64", "PCG64DXSM", "MT19937",
              "Philox", "SFC64", "seed", "set_state"}, "torch": {"seed"}}
ENVIRONMENT = ("environ", "getenv")

#: namespaces of operators that torch wrote
_OF_TORCH = frozenset(("aten", "prims", "rngprims", "debug_mode_ops"))
#: functions after which random numbers are the same ones again, or that ask which these are
SEEDING = frozenset(("manual_seed", "manual_seed_all", "fork_rng", "set_rng_state",
                      "set_rng_state_all", "seed_everything", "initial_seed", "get_rng_state",
                      "get_rng_state_all"))


def acts(value: Any) -> bool:
    """Whether a function or class, by whatever name, acts on the world or reads it."""
    owner, name = owner_of(value), getattr(value, "__name__", None)
    return owner in CHANGING_MODULES or name in OF_THE_WORLD.get(owner, ()) or (
        owner == "builtins" and name in ACTING)


def owner_of(value: Any) -> str:
    """The package that a value belongs to."""
    name = getattr(value, "__module__", None)
    if name is None:  # a builtin method, such as `random.seed`
        name = type(getattr(value, "__self__", None)).__module__
    return {"posix": "os", "nt": "os"}.get(name, name).lstrip("_").partition(".")[0]


def operators(names: set[str]) -> list[Any]:
    """Operators of torch that are written in Python, and whose namespace and name are among these.
    Raises Unknown of one whose functions torch does not give."""
    known = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
    found = {whole: one for whole, one in known.items() if names.issuperset(whole.split("::"))}
    for key in getattr(library, "_impls", ()):
        space, name, *_ = key.split("/")
        name = name.partition(".")[0]
        if (space not in _OF_TORCH and names.issuperset((space, name))
            and f"{space}::{name}" not in found):
            raise Unknown(f"the operator {space}::{name}")
    return [*found.values()]
