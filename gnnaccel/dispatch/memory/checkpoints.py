"""Whether a checkpoint may be around a call: it repeats the call in backward, and both have to save
the same tensors."""
from __future__ import annotations

import torch

_autograd = torch._C._autograd


def by_disabling(ignore_is_tracing: bool) -> bool | None:
    """`saved_tensor_hooks` for versions of torch without a function for it: torch refuses to
    disable hooks while there are any. True, or None where there are none."""
    if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return None  # they are disabled already, as in a function transform
    try:
        _autograd._saved_tensors_hooks_disable("gnnaccel asks whether there are hooks")
    except RuntimeError:
        return True
    finally:
        _autograd._saved_tensors_hooks_enable()
    return None


#: Private to torch; 2.4 to 2.7 lack it. `checkpointed`, for code that cannot afford a call,
#: is ``saved_tensor_hooks(True) is not None``.
saved_tensor_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", by_disabling)


def checkpointed() -> bool:
    """Whether saved tensors go through hooks here, as those of a checkpoint do; a script's own
    hooks look the same."""
    return saved_tensor_hooks(True) is not None
