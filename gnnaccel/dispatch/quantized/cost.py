"""Whether rows of fewer bytes pay: gain of gathering them against the cost of storing them.

Rates are those of `gnnaccel.dispatch.plan.cost` and, under "quantized", margins and limits of
``constants.json``.
"""
from __future__ import annotations

from typing import NamedTuple

from gnnaccel.cuda.int8.quantize import stride
from gnnaccel.dispatch.plan.cost import constants
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized.rows import Storage

_SECTOR = 32  # bytes that memory moves at the least


class Sizes(NamedTuple):
    """Sizes of a call: nodes at both ends, edges, channels of a row, bytes of one in fp32 or as it
    comes; ``grad``: with backward."""

    num_src: int
    num_dst: int
    num_edges: int
    channels: int
    itemsize: int
    grad: bool


def gain(sizes: Sizes, storage: Storage) -> float:
    """Estimated seconds as the rows come over those in ``storage``, for forward and, with
    gradients, backward."""
    plain, stored = _pass(sizes.num_src, sizes, "fp32"), _pass(sizes.num_src, sizes, storage.format)
    if sizes.grad:
        plain += _pass(sizes.num_dst, sizes, "fp32")
        stored += _pass(sizes.num_dst, sizes, storage.backward)
    return plain / stored


def reason_against(sizes: Sizes, storage: Storage) -> Reason | None:
    """Why ``storage`` is not expected to be faster."""
    limits = constants()["quantized"]
    degree = sizes.num_edges / max(1, sizes.num_src)
    if degree < limits["degree"]:
        return reason("GA604",
                      f"a row is read {degree:.1f} times; converting it pays from "
                      f"{limits['degree']:g} times on")
    least = limits["narrow"] if degree < limits["narrow_degree"] else limits["least"]
    if storage.format == "int8" and sizes.channels < least:
        return reason("GA604",
                      f"{sizes.channels} channels, and a row is read {degree:.1f} times; int8 rows "
                      f"pay from {least} channels on")
    estimate = gain(sizes, storage)
    if estimate >= limits["margin"]:
        return None
    seconds = _pass(sizes.num_src, sizes, "fp32") * 1e6
    return reason("GA604",
                  f"estimated {estimate:.2f} times as fast, below {limits['margin']:g}: "
                  f"{sizes.channels} channels, "
                           f"{sizes.num_edges} edges, {seconds:.0f} us in fp32")


def map_gain(rows: int, inner: int, columns: int, grad: tuple[bool, bool], tf32: bool) -> float:
    """Estimated seconds of a linear map [rows, inner] -> [rows, columns] by torch over those in
    int8, for forward and backward. ``grad``: whether the input and the weight have gradients; the
    weight's is fp32 either way. ``tf32``: torch may use it."""
    rates = constants()["quantized"]["projection"]
    rate, size = rates["tf32" if tf32 else "fp32"], (rows, inner, columns)
    plain, stored = _product(*size, rate, 4), _int8_product(*size)
    if grad[0]:
        plain += _product(rows, columns, inner, rate, 4)
        stored += _int8_product(rows, columns, inner)
    if grad[1]:
        d_weight = _product(*size, rate, 4)
        plain, stored = plain + d_weight, stored + d_weight
    return plain / stored


def map_reason_against(rows: int, inner: int, columns: int, grad: tuple[bool, bool],
                       tf32: bool) -> Reason | None:
    """Why a linear map in int8 is not expected to be faster."""
    estimate, margin = map_gain(rows, inner, columns, grad,
                                tf32), constants()["quantized"]["projection"]["margin"]
    if estimate >= margin:
        return None
    return reason("GA604",
                  f"estimated {estimate:.2f} times as fast, below {margin:g}: {rows} rows "
                  f"of {inner} by {columns}"
                           f"{', with TF32 allowed' if tf32 else ''}")


def _product(rows: int, inner: int, columns: int, rate: float, itemsize: int) -> float:
    """Seconds of a product that reads rows of ``itemsize`` bytes a number and writes fp32."""
    traffic = rows * (itemsize * inner + 4 * columns) / constants()["cuda"]["gather_hbm"]
    return max(traffic, 2.0 * rows * inner * columns / rate) + constants()["cuda"]["launch"]


def _int8_product(rows: int, inner: int, columns: int) -> float:
    """Seconds of a product of int8 rows and matrix, with their conversion."""
    rates = constants()["quantized"]["projection"]
    conversion = rows * 5 * inner / constants()["cuda"]["gather_hbm"]
    return _product(rows, inner, columns, rates["int8"], 1) + conversion + rates["seconds"]


def _pass(rows: int, sizes: Sizes, form: str) -> float:
    """Seconds to make ``rows`` rows and gather one per edge."""
    rates, limits = constants()["cuda"], constants()["quantized"]
    plain = sizes.channels * sizes.itemsize
    size = {"int8": stride(sizes.channels) + 4, "bf16": 2 * sizes.channels}.get(form, plain)
    row_bytes = -(-size // _SECTOR) * _SECTOR if form != "fp32" else size
    cached = rates["l2_bytes"] * (limits["l2_slack"] if form == "fp32" else 1)
    rate = rates["gather_l2"] if rows * size <= cached else rates["gather_hbm"]
    launches = limits["launches"]
    if form == "fp32":
        return sizes.num_edges * row_bytes / rate + launches * rates["launch"]
    conversion = rows * (plain + size) / rates["gather_hbm"]
    return (conversion + sizes.num_edges * row_bytes / (rate * limits["efficiency"])
            + (launches + 1) * rates["launch"])
