"""Fused GPU kernels under unmodified PyTorch Geometric and DGL layers.

``import gnnaccel; gnnaccel.enable()`` is the whole of it. Importing this package loads neither
torch nor a host library and patches nothing. Each public name is resolved on first use. Three
things happen: the package's own modules run when they are first used (`gnnaccel.lazy`), a finder
for ``dgl.graphbolt`` lets a later ``import dgl`` work where that part of DGL cannot be loaded
(`gnnaccel.finder`), and the one environment variable that is read, ``GNNACCEL_STANDINS``, asks for
`standins`.
"""
from __future__ import annotations

import importlib
import os as _os
from typing import TYPE_CHECKING, Any

from gnnaccel import lazy as _lazy

_lazy.install()

from gnnaccel import finder as _finder  # noqa: E402
from gnnaccel._version import __version__  # noqa: E402

if TYPE_CHECKING:  # for editors and type checkers, which cannot see through __getattr__
    from gnnaccel import distributed as distributed
    from gnnaccel import errors as errors
    from gnnaccel.adapters.pyg.offload.running import offload as offload
    from gnnaccel.adapters.standins import standins as standins
    from gnnaccel.dispatch.graph import cache as cache
    from gnnaccel.dispatch.observe.counters import reset_stats as reset_stats
    from gnnaccel.dispatch.observe.counters import stats as stats
    from gnnaccel.dispatch.policy.names import name_layers as name_layers
    from gnnaccel.dispatch.policy.rules import exclude as exclude
    from gnnaccel.dispatch.policy.rules import include as include
    from gnnaccel.dispatch.policy.rules import reset_rules as reset_rules
    from gnnaccel.magics import load_ipython_extension as load_ipython_extension
    from gnnaccel.magics import unload_ipython_extension as unload_ipython_extension
    from gnnaccel.profile.autotune import autotune as autotune
    from gnnaccel.profile.compare import compare as compare
    from gnnaccel.profile.explain import explain as explain
    from gnnaccel.profile.explain_program import explain_program as explain_program
    from gnnaccel.profile.gain.blocks import gain as gain
    from gnnaccel.profile.report import report as report
    from gnnaccel.quantization import dequantize as dequantize
    from gnnaccel.quantization import precision as precision
    from gnnaccel.quantization import quant_report as quant_report
    from gnnaccel.quantization import quantize as quantize
    from gnnaccel.session import clear_records as clear_records
    from gnnaccel.session import disable as disable
    from gnnaccel.session import disabled as disabled
    from gnnaccel.session import enable as enable
    from gnnaccel.session import enabled as enabled
    from gnnaccel.session import records as records
    from gnnaccel.session import status as status

# public name -> (module, attribute in it; None is the module itself)
_HOMES: dict[str, tuple[str, str | None]] = {
    "enable": ("gnnaccel.session", "enable"),
    "disable": ("gnnaccel.session", "disable"),
    "enabled": ("gnnaccel.session", "enabled"),
    "disabled": ("gnnaccel.session", "disabled"),
    "status": ("gnnaccel.session", "status"),
    "records": ("gnnaccel.session", "records"),
    "clear_records": ("gnnaccel.session", "clear_records"),
    "stats": ("gnnaccel.dispatch.observe.counters", "stats"),
    "reset_stats": ("gnnaccel.dispatch.observe.counters", "reset_stats"),
    "include": ("gnnaccel.dispatch.policy.rules", "include"),
    "exclude": ("gnnaccel.dispatch.policy.rules", "exclude"),
    "reset_rules": ("gnnaccel.dispatch.policy.rules", "reset_rules"),
    "name_layers": ("gnnaccel.dispatch.policy.names", "name_layers"),
    "compare": ("gnnaccel.profile.compare", "compare"),
    "explain": ("gnnaccel.profile.explain", "explain"),
    "explain_program": ("gnnaccel.profile.explain_program", "explain_program"),
    "report": ("gnnaccel.profile.report", "report"),
    "gain": ("gnnaccel.profile.gain.blocks", "gain"),
    "quantize": ("gnnaccel.quantization", "quantize"),
    "dequantize": ("gnnaccel.quantization", "dequantize"),
    "precision": ("gnnaccel.quantization", "precision"),
    "quant_report": ("gnnaccel.quantization", "quant_report"),
    "cache": ("gnnaccel.dispatch.graph.cache", None),
    "autotune": ("gnnaccel.profile.autotune", "autotune"),
    "distributed": ("gnnaccel.distributed", None),
    "offload": ("gnnaccel.adapters.pyg.offload.running", "offload"),
    "errors": ("gnnaccel.errors", None),
    "standins": ("gnnaccel.adapters.standins", "standins"),
    "load_ipython_extension": ("gnnaccel.magics", "load_ipython_extension"),
    "unload_ipython_extension": ("gnnaccel.magics", "unload_ipython_extension"),
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - keys of _HOMES are strings

_finder.install()
if _os.environ.get("GNNACCEL_STANDINS"):
    from gnnaccel import env as _env
    from gnnaccel.adapters import standins as _standins

    _standins.from_environment(_env.standins())


def __getattr__(name: str) -> Any:
    """Resolve a public name (PEP 562) and keep it, so that it is looked up once."""
    try:
        module_name, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'gnnaccel' has no attribute {name!r}") from None
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
