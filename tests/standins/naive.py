"""What the stand-ins are held against: the documented behaviour, element by element."""
from __future__ import annotations

import itertools

import torch


def reduced(values: list, reduce: str):
    """One group. Integers of a mean are rounded down."""
    if not values:
        return 1 if reduce == "mul" else 0
    if reduce == "mean":
        total = sum(values)
        return total // len(values) if isinstance(total, int) else total / len(values)
    if reduce == "mul":
        out = 1
        for value in values:
            out *= value
        return out
    return {"sum": sum, "add": sum, "min": min, "max": max}[reduce](values)


def scatter(src, index, dim, size, reduce):
    """(values, position of the first extremum): ``index`` has the shape of ``src``."""
    shape = list(src.shape)
    shape[dim] = size
    out = torch.zeros(shape, dtype=src.dtype)
    place = torch.full(shape, src.size(dim))
    others = [range(n) for i, n in enumerate(src.shape) if i != dim]
    for rest in itertools.product(*others):
        line = tuple(rest[:dim]) + (slice(None),) + tuple(rest[dim:])
        values, groups = src[line].tolist(), index[line].tolist()
        for group in range(size):
            members = [i for i, g in enumerate(groups) if g == group]
            found = reduced([values[i] for i in members], reduce)
            at = tuple(rest[:dim]) + (group,) + tuple(rest[dim:])
            out[at] = found
            if reduce in ("min", "max") and members:
                place[at] = next(i for i in members if values[i] == found)
    return out, place


def neighbours(x, y, batch_x, batch_y):
    """For each point of ``y`` the points of its example in ``x`` as (distance, point), nearest
    first."""
    found = []
    for i in range(len(y)):
        distances = ((x - y[i]) ** 2).sum(-1).sqrt()
        found.append(sorted((float(distances[j]), j) for j in range(len(x))
                            if batch_x[j] == batch_y[i]))
    return found
