"""The ways in which users call layers: gradients or none, autocast, checkpoints, precisions, ..."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .graphs import Case
from .judge import FLOOR, Results
from .trees import as_dtype, dense_float, named, tree_map


def call_plainly(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    return module(*args, **kwargs)


def call_in_checkpoint(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    return checkpoint(module, *args, use_reentrant=False, **kwargs)


def call_in_reentrant_checkpoint(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """It sees gradients of tensors among its arguments only, not of those inside of dicts."""
    return checkpoint(lambda *a: module(*a, **kwargs), *args, use_reentrant=True)


def call_with_functional_weights(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    weights = {name: p * 1.25 for name, p in module.named_parameters()}
    return torch.func.functional_call(module, weights, args, kwargs)


def call_in_vmap(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    x, *rest = args
    two = tree_map(lambda t: torch.stack([t, t * 0.5]), x)
    return torch.vmap(lambda one: module(one, *rest, **kwargs))(two)


def call_compiled(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="eager")(*args, **kwargs)


def call_on_a_copy(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    with torch.no_grad():
        module(*args, **kwargs)
    other = copy.deepcopy(module)
    other.load_state_dict(dict(module.named_parameters()) | dict(module.named_buffers()),
                          strict=False, assign=True)
    return other(*args, **kwargs)


def call_and_write(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """As models go on in place, where the host's own results allow it."""
    return tree_map(lambda t: t.mul_(0.75).relu_() if dense_float(t) else t,
                    module(*args, **kwargs))


def call_and_write_inputs(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """The inputs change after the call, where the host needs them no more."""
    args, kwargs = tree_map(lambda t: t * 1.0 if dense_float(t) else t, (args, kwargs))
    found = module(*args, **kwargs)
    tree_map(lambda t: t.mul_(0.5) if dense_float(t) else t, (args, kwargs))
    return found


def first_gradients(loss: Tensor, wrt: list[Tensor]) -> list:
    return list(torch.autograd.grad(loss, wrt, allow_unused=True))


def gradients_by_backward(loss: Tensor, wrt: list[Tensor]) -> list:
    loss.backward()
    found = [t.grad for t in wrt]
    for t in wrt:
        t.grad = None
    return found


def second_gradients(loss: Tensor, wrt: list[Tensor]) -> list:
    first = torch.autograd.grad(loss, wrt, create_graph=True, allow_unused=True)
    squares = [g.pow(2).sum() for g in first if g is not None and g.requires_grad]
    if not squares or not (total := sum(squares)).requires_grad:
        return list(first)
    return [*first, *torch.autograd.grad(total, wrt, allow_unused=True)]


def gradients_twice(loss: Tensor, wrt: list[Tensor]) -> list:
    torch.autograd.grad(loss, wrt, allow_unused=True, retain_graph=True)
    return first_gradients(loss, wrt)


@contextlib.contextmanager
def deterministic(device: torch.device):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_device(device: torch.device):
    """As scripts begin. On a CPU: a default that is not the tensors' device."""
    torch.set_default_device("cuda" if device.type == "cuda" else "meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def autocast(device: torch.device):
    return torch.autocast(device.type, dtype=torch.bfloat16)


def nothing(device: torch.device):
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Mode:
    """``often``: its share among modes; ``before``: calls that come first; ``floor``: of errors."""

    often: float = 4
    call: Callable = call_plainly
    around: Callable = nothing
    gradients: Callable | None = first_gradients
    inputs: bool = True  # whether inputs get gradients
    parameters: bool = True
    train: bool = False
    dtype: torch.dtype | None = None
    before: int = 0
    floor: float = FLOOR
    options: dict = field(default_factory=dict)  # of enabled()
    inference: bool = False

    @property
    def in_16_bits(self) -> bool:
        """Whether a gradient that cancels may be off by all of itself."""
        return self.dtype in (torch.bfloat16, torch.float16) or self.around is autocast

    def exact(self) -> Mode:
        """The same in fp64: no autocast."""
        changed = {"around": nothing} if self.around is autocast else {}
        return Mode(**{**self.__dict__, **changed, "before": 0, "dtype": torch.float64})


MODES = {
    "grad": Mode(12),
    "train": Mode(3, train=True),
    "no_grad": Mode(gradients=None),
    "frozen": Mode(3, inputs=False, parameters=False),
    "inference": Mode(gradients=None, inference=True),
    "only_x": Mode(parameters=False),
    "only_parameters": Mode(3, inputs=False),
    "autocast": Mode(around=autocast, floor=1e-2),
    "checkpoint": Mode(call=call_in_checkpoint, gradients=gradients_by_backward),
    "reentrant": Mode(call=call_in_reentrant_checkpoint, gradients=gradients_by_backward),
    "deterministic": Mode(around=deterministic),
    "again": Mode(8, before=3),
    "second": Mode(gradients=second_gradients),
    "twice": Mode(gradients=gradients_twice),
    "functional_call": Mode(3, call=call_with_functional_weights),
    "vmap": Mode(1, call=call_in_vmap),
    "default_device": Mode(around=default_device),
    "compiled": Mode(0.1, call=call_compiled),
    "copy": Mode(3, call=call_on_a_copy),
    "in_place": Mode(4, call=call_and_write),
    "inputs_written": Mode(2, call=call_and_write_inputs),
    "in_place_again": Mode(2, call=call_and_write, before=3),
    "float64": Mode(2, dtype=torch.float64),
    "bfloat16": Mode(3, dtype=torch.bfloat16, floor=1e-2),
    "float16": Mode(1, dtype=torch.float16, floor=2e-3),
    "records": Mode(2, options={"records": 10}, before=1),
    "plain_enable": Mode(options={"when": "profitable"}, before=2),
    "again_no_passes": Mode(2, options={"passes": ()}, before=1),
}


def prepared(case: Case, mode: Mode) -> Case:
    """The case in the mode's precision, its parameters trained or not."""
    module = case.module if mode.dtype is None else case.module.to(mode.dtype)
    module.train(mode.train)
    if not mode.parameters:
        module.requires_grad_(False)
    return Case(module, as_dtype(case.args, mode.dtype), as_dtype(case.kwargs, mode.dtype),
                case.note)


def run(case: Case, mode: Mode, device: torch.device, seed: int,
        earlier: Callable[[nn.Module], None] | None = None) -> Results:
    """Outputs and gradients of a copy of the module, by name; ``earlier`` is given the copy first, and
    ``mode.before`` calls come next."""
    module = copy.deepcopy(case.module)
    if earlier is not None:
        earlier(module)
    for turn in range(mode.before):
        with torch.set_grad_enabled(mode.gradients is not None and turn != 1):
            once(module, case, mode, device, seed)
    return once(module, case, mode, device, seed)


def once(module: nn.Module, case: Case, mode: Mode, device: torch.device, seed: int) -> Results:
    """Outputs and gradients of one call."""
    torch.manual_seed(seed)
    leaves: dict[str, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        if (
            not dense_float(tensor)
            or not mode.inputs
            or mode.gradients is None
            or not tensor.numel()
        ):
            return tensor.detach()
        leaves[f"input {len(leaves)}"] = found = tensor.detach().requires_grad_()
        return found

    args, kwargs = tree_map(leaf, case.args), tree_map(leaf, case.kwargs)
    grads = (contextlib.nullcontext() if mode.gradients is not None else torch.inference_mode()
             if mode.inference else torch.no_grad())
    with mode.around(device):
        with grads:
            found = named(mode.call(module, args, kwargs))
        found = dict(found)
        loss = _loss(found, seed)
        if mode.gradients is None or loss is None:
            return found
        leaves.update((name, p) for name, p in module.named_parameters() if p.requires_grad)
        if not leaves:
            return found
        grads = mode.gradients(loss, list(leaves.values()))
    names = [f"{times} of {name}" for times in ("gradient", "second gradient") for name in leaves]
    return {**found, **dict(zip(names, grads))}


def _loss(outs: Results, seed: int) -> Tensor | None:
    """A loss that is neither linear in the outputs nor the same for equal ones."""
    generator = torch.Generator().manual_seed(seed)
    total = None
    for t in outs.values():
        if t.is_floating_point() and t.requires_grad:
            wide = torch.float64 if t.dtype == torch.float64 else torch.float32
            weight = torch.randn(t.shape, generator=generator, device="cpu").to(t.device, wide)
            term = (t.to(wide) * weight).sum() + t.to(wide).pow(2).sum() * 0.5
            total = term if total is None else total + term
    return total
