"""Whether a checkpoint may be around a call: it repeats the call in backward, and both have to save
the same tensors."""
from __future__ import annotations

import torch

#: Private to torch, and all that tells: a torch without it is taken to have no checkpoint around
#: any call. `checkpointed`, for those who cannot afford a call, is
#: ``saved_tensor_hooks(True) is not None``.
saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks",
                             lambda ignore_is_tracing: None)


def checkpointed() -> bool:
    """Whether saved tensors go through hooks here, as those of a checkpoint do; a script's own
    hooks look the same."""
    return saved_tensor_hooks(True) is not None
