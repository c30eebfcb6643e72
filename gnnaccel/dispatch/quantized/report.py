"""Report of quantized layers, as data and as a table."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gnnaccel.dispatch.quantized.settings import Entry


@dataclass(frozen=True)
class Row:
    """Report of a layer. ``asked``: its format (None: only a block or the environment asks);
    ``ran``: that of its last quantized call, "forward/backward" where those differ; ``quantized``,
    ``in_fp32``: calls; ``reasons``: of the latter, counts by code; ``reason``: the last of them, or
    the reason that keeps the layer fp32.

    ``error``, ``worst_error``: median relative L2 of sampled results against fp32, last and
    largest; ``zero_rows``, ``outlier_rows``: shares of sampled rows; ``gradients_not_finite``: a
    gradient had a number that was not. ``guard``: "off", "waiting", "passed" or "failed".
    ``estimated_gain``, ``measured_gain``: time in fp32 over that, of a call.
    """

    name: str
    layer: str
    asked: str | None
    ran: str | None
    quantized: int
    in_fp32: int
    reasons: dict[str, int]
    reason: str | None
    checks: int
    error: float | None
    worst_error: float | None
    zero_rows: float | None
    outlier_rows: float | None
    gradients_not_finite: bool | None
    guard: str
    estimated_gain: float | None
    measured_gain: float | None


def _row(entry: Entry) -> Row:
    watch, storage = entry.watch, entry.storage
    watch.settle()
    why: str | None
    if entry.setting is not None and entry.setting.why is not None:
        why = str(entry.setting.why)
    else:
        why = (f"GA605 {watch.failure}" if watch.failure else None
               if entry.last is None else str(entry.last))
    form = (None if storage is None else storage.format
            if storage.format == storage.backward else "/".join(storage))
    last, setting = watch.last or {}, entry.setting
    wanted = None if setting is None else "fp32" if setting.why else setting.format
    return Row(entry.name, entry.layer, wanted,
               form, entry.quantized, entry.in_fp32, dict(entry.reasons), why, watch.checks,
               last.get("error"), watch.worst if last else None, last.get("zero_rows"),
               last.get("outlier_rows"), bool(last["gradients_not_finite"]) if last else None,
               "off" if wanted == "fp32" else watch.state(), entry.gain, entry.measured)


@dataclass(frozen=True)
class QuantReport:
    """``rows``: one `Row` per layer of a graph; ``maps``: one per linear map inside those in int8.
    ``str()`` is a table for reading; ``as_dicts()`` is for machines: the layers, then the maps."""

    rows: tuple[Row, ...]
    maps: tuple[Row, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry], maps: Iterable[Entry] = ()) -> QuantReport:
        return cls(tuple(map(_row, entries)), tuple(map(_row, maps)))

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in (*self.rows, *self.maps)]

    def share_in_fp32(self, maps: bool = False) -> float | None:
        """Share of calls in fp32, among those of layers, or of linear ``maps``, that were asked for
        another format; None without calls."""
        rows = [row for row in (self.maps if maps else self.rows) if row.asked != "fp32"]
        total = sum(row.quantized + row.in_fp32 for row in rows)
        return sum(row.in_fp32 for row in rows) / total if total else None

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=130, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get().rstrip()

    def table(self) -> Any:
        """A `rich.table.Table`."""
        from rich.table import Table

        table = Table(title="rows that layers gather, and their linear maps"
                      if self.maps else "rows that layers gather")
        for name in ("layer", "asked", "ran", "calls", "in fp32", "error", "worst", "guard", "gain",
                     "why fp32"):
            table.add_column(name,
                             justify="left"
                             if name in ("layer", "asked", "ran", "guard", "why fp32") else "right",
                             overflow="fold")
        for row in (*self.rows, *self.maps):
            if self.maps and row is self.maps[0]:
                table.add_section()
            table.add_row(f"{row.name} ({row.layer})", row.asked or "-", row.ran or "-",
                          str(row.quantized + row.in_fp32), str(row.in_fp32), _number(row.error),
                          _number(row.worst_error), row.guard, _gain(row), row.reason or "")
        return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _gain(row: Row) -> str:
    if row.measured_gain is not None:
        return f"{row.measured_gain:.2f}x"
    return "-" if row.estimated_gain is None else f"~{row.estimated_gain:.2f}x"
