"""Row counts to multiply by one weight matrix per segment: those of the relations of well-known
graphs."""
from __future__ import annotations

import dataclasses

import torch

from gnnaccel.adapters.pyg.bench.layers import named
from gnnaccel.profile.bench import relation_shapes


@dataclasses.dataclass(frozen=True)
class SegmentShape:
    """``rows`` in ``segments``, each times a ``width`` x ``width`` matrix of its own. Sizes follow
    ``relation``'s."""

    name: str
    rows: int
    segments: int
    width: int
    relation: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """The tensors of one multiplication. ``bounds`` is where each segment starts and, last, where
    the last one ends, as plain numbers; ``ptr`` the same on the device, int64."""

    shape: SegmentShape
    bounds: tuple[int, ...]
    ptr: torch.Tensor
    x: torch.Tensor
    w: torch.Tensor
    grad: torch.Tensor


SHAPES = {shape.name: shape for shape in (
    SegmentShape("tiny 16", 600, 12, 16),
    SegmentShape("aifb 64", 49_000, 78, 64),
    SegmentShape("fb15k 64", 620_000, 474, 64),
    SegmentShape("fb15k 128", 620_000, 474, 128),
    SegmentShape("am 64", 5_700_000, 96, 64),
    SegmentShape("am 128", 5_700_000, 96, 128),
    SegmentShape("mag 64", 21_111_007, 4, 64, "mag-size"),
    SegmentShape("mag 128", 21_111_007, 4, 128, "mag-size"),
)}


def resolve(name: str) -> SegmentShape:
    """The shape called ``name``, see `named`."""
    return named(name, SHAPES, "shape")


def make(shape: SegmentShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Case:
    """Random rows and matrices. The segments are shuffled, so that no kernel profits from the
    largest coming first."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = _sizes(shape)
    sizes = sizes[torch.randperm(len(sizes), generator=torch.Generator("cpu").manual_seed(seed),
                                 device="cpu")]
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    width = shape.width

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype, generator=generator)

    return Case(shape, tuple(ptr.tolist()), ptr.to(device), random(shape.rows, width),
                random(shape.segments, width, width) / width**0.5, random(shape.rows, width))


def _sizes(shape: SegmentShape) -> torch.Tensor:
    if shape.relation:
        return relation_shapes.relation_sizes(relation_shapes.SHAPES[shape.relation])
    return relation_shapes.relation_sizes(relation_shapes.RelationShape("", (1,), shape.rows,
                                                                        shape.segments))
