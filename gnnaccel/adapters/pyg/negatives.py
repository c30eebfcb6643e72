"""PyG's ``negative_sampling``: the same samples from the same state of Python's generator, without
a Python loop over them, and without the way over the host where the edges are on a GPU.

PyG draws by ``random.sample``, which takes some 0.6 microseconds for each edge, and looks for the
drawn pairs among the edges on the CPU. In layers that sample in each forward, such as SuperGATConv,
and in link prediction, that is most of a step.
"""
from __future__ import annotations

import functools
import importlib
import inspect
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gnnaccel.adapters import own
from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.propagate import kept_results
from gnnaccel.dispatch.policy.config import current

_MODULE = "torch_geometric.utils._negative_sampling"
_FEW = 512  # samples below which a loop is as fast
_WORD = 32  # bits that the Mersenne Twister gives at once
_TRIES = 3  # PyG's number of tries
_drawing = threading.Lock()
_unused = [0]  # edges whose numbers were kept since such numbers were used again


def install(patches: PatchSet, modules: list[Any]) -> None:
    """Replace ``sample`` where it is defined, and ``negative_sampling`` wherever one of ``modules``
    has it but there, where pickles look for it."""
    defined = importlib.import_module(_MODULE)
    sample: Any = getattr(defined, "sample", None)
    if _is_as_known(sample, "sample", "population", "k", "device"):
        patches.set(defined, "sample", _sample(sample),
                    "Draws all samples at once. They are the same: those of `random.sample`, "
                    "whose generator ends in the same state.")
    native = defined.negative_sampling
    if not _is_as_known(native, "negative_sampling", "edge_index", "num_nodes", "num_neg_samples",
                        "method", "force_undirected"):
        return
    wrapper = _negative_sampling(native, defined)
    for module in modules:
        if module is not defined and vars(module).get("negative_sampling") is native:
            patches.set(module, "negative_sampling", wrapper,
                        "Looks for the drawn pairs among the edges on the GPU, where the edges "
                        "are on one; on a CPU PyG's code runs.")


def _is_as_known(function: Any, name: str, *parameters: str) -> bool:
    return (own.is_function(function, "torch_geometric", name)
            and tuple(inspect.signature(function).parameters) == parameters)


# --- drawing --------------------------------------------------------------------------------------

def _sample(native: Callable) -> Callable:
    @functools.wraps(native)
    def sample(population: int, k: int, device: Any = None) -> Tensor:
        if (is_compiling() or current() is None or type(population) is not int
            or type(k) is not int or not drawable(population, k)
            or not _drawing.acquire(blocking=False)):  # another thread is drawing, or a fork's was
            return native(population, k, device)
        try:
            samples = drawn(population, k)
        finally:
            _drawing.release()
        return torch.as_tensor(samples, device=device)

    return sample


def drawable(population: int, k: int) -> bool:
    """Whether `drawn` gives the same as ``random.sample``: where that takes its way for few of
    many, and nobody has replaced it."""
    if not _FEW <= k < population or population.bit_length() > 2 * _WORD - 1:
        return False
    if population <= 21 + 4**math.ceil(math.log(k * 3, 4)):  # it shuffles a list then
        return False
    function = getattr(random.sample, "__func__", None)
    return (function is not None and function.__module__ == "random"
            and type(random.sample.__self__) is random.Random  # type: ignore[attr-defined]
            and function is vars(random.Random).get("sample")
            and vars(random.Random).get("_randbelow")
            is vars(random.Random).get("_randbelow_with_getrandbits"))


def drawn(population: int, k: int) -> Any:
    """``random.sample(range(population), k)`` as an array [k] of int64; Python's generator is then
    in the state in which that leaves it.

    The function takes numbers of as many bits as ``population`` has, leaves out those that are too
    large and those that came before. numpy has the same generator, and draws many numbers at once.
    """
    import numpy as np

    version, (*key, at), gauss = random.getstate()
    start = {"bit_generator": "MT19937", "state": {"key": np.array(key, np.uint32), "pos": at}}
    source, bits = _source(), population.bit_length()
    words, rate = 1 + (bits > _WORD), population / 2**bits
    count = int(1.02 * k / rate) + 64
    while True:
        source.state = start
        numbers = _numbers(source.random_raw(count * words), bits)
        fitting = np.flatnonzero(numbers < population)
        firsts = _first_of_each(numbers[fitting], bits, k)
        if firsts is not None:
            break
        count *= 2
    source.state = start
    source.random_raw((int(fitting[firsts[-1]]) + 1) * words)
    after = source.state["state"]
    random.setstate((version, (*after["key"].tolist(), after["pos"]), gauss))
    return numbers[fitting[firsts]].astype(np.int64)


@functools.cache
def _source() -> Any:
    """numpy's generator, used while `_drawing` is held."""
    import numpy as np

    return np.random.MT19937(0)


def _numbers(raw: Any, bits: int) -> Any:
    """The results of ``getrandbits(bits)``, made of words of 32 bits: low words come first, and of
    the last the upper bits are taken."""
    if bits <= _WORD:
        return raw >> (_WORD - bits)
    return raw[::2] | ((raw[1::2] >> (2 * _WORD - bits)) << _WORD)


def _first_of_each(values: Any, bits: int, k: int) -> Any:
    """Places of the first ``k`` values, of so many ``bits``, that are not among those before them;
    None if these are fewer."""
    import numpy as np

    places, within = np.arange(values.size, dtype=np.uint64), values.size.bit_length()
    if bits + within <= 2 * _WORD:  # sorted as numbers, with the place below: 10x argsort's speed
        values = np.sort(values << within | places)
        ordered, places = values >> within, values & ((1 << within) - 1)
    else:
        places = np.argsort(values, kind="stable")
        ordered = values[places]
    first = np.ones(values.size, bool)
    first[places[1:][ordered[1:] == ordered[:-1]]] = False
    firsts = np.flatnonzero(first)[:k]
    return firsts if firsts.size == k else None


# --- looking for the drawn pairs ------------------------------------------------------------------

def _negative_sampling(native: Callable, defined: Any) -> Callable:
    @functools.wraps(native)
    def negative_sampling(edge_index: Tensor, num_nodes: Any = None, num_neg_samples: Any = None,
                          method: str = "sparse", force_undirected: bool = False) -> Tensor:
        if (is_compiling() or current() is None or type(edge_index) is not Tensor
            or not edge_index.is_cuda or method != "sparse" or force_undirected
            or type(num_nodes) is not int or type(num_neg_samples) not in (int, type(None))
            or edge_index.dtype != torch.int64 or context_reason() is not None):
            return native(edge_index, num_nodes, num_neg_samples, method, force_undirected)
        return on_device(defined, edge_index, num_nodes, num_neg_samples)

    return negative_sampling


def on_device(defined: Any, edge_index: Tensor, num_nodes: int, wanted: int | None) -> Tensor:
    """[2, about ``wanted``] pairs of nodes that are no edges of ``edge_index`` [2, E], as PyG's
    ``negative_sampling`` by its method "sparse" gives them. ``defined``: PyG's module of it."""
    args = edge_index, num_nodes
    existing, = (kept_results.find("edges as sorted numbers", _numbered, args, {}, unused=_unused)
                 or _numbered(*args))
    population = num_nodes * num_nodes - num_nodes
    if existing.numel() >= population:
        return edge_index.new_empty((2, 0))
    wanted = edge_index.shape[1] if wanted is None else wanted
    count = int(1.1 * wanted / (1.0 - existing.numel() / population))
    negatives: Any = None
    for _ in range(_TRIES):
        pairs = defined.sample(population, count, edge_index.device)
        pairs = pairs[_not_in(existing, pairs)]
        if negatives is not None:
            pairs = torch.cat([negatives, pairs[_not_in(negatives.sort()[0], pairs)]])
        negatives = pairs
        if negatives.numel() >= wanted:
            negatives = negatives[:wanted]
            break
    src = negatives.div(num_nodes - 1, rounding_mode="floor")
    dst = negatives - src * (num_nodes - 1)
    return torch.stack([src, dst + (src <= dst)])


def _numbered(edge_index: Tensor, num_nodes: int) -> tuple[Tensor]:
    """The edges but self loops as sorted numbers of pairs, as PyG's ``edge_index_to_vector``
    numbers them: node 0 with each other node, then node 1 with each other, and so on."""
    src, dst = edge_index[:, edge_index[0] != edge_index[1]]
    return ((src * (num_nodes - 1) + dst - (src < dst).long()).sort()[0],)


def _not_in(ordered: Tensor, values: Tensor) -> Tensor:
    """Which ``values`` are not in ``ordered``. `torch.isin` would wait for the device."""
    if not ordered.numel():
        return values >= 0
    places = torch.searchsorted(ordered, values).clamp_(max=ordered.numel() - 1)
    return ordered[places] != values
