"""Hard inputs for rounded rows: where errors grow, and where the guard sends a layer back to
fp32."""
from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import SimpleConv

import gnnaccel

NODES, EDGES, WIDTH = 4000, 60000, 64
DEPTHS = (2, 4, 8)
CALLS = 3  # the guard reads what a call measured at the next


class Stack(nn.Module):
    """Layers that sum over neighbours, and so keep nothing in bounds: a node with many has large
    rows."""

    def __init__(self, depth: int):
        super().__init__()
        self.convs = nn.ModuleList(SimpleConv(aggr="add") for _ in range(depth))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, linear in zip(self.convs, self.linears):
            x = F.relu(linear(conv(x, edge_index)))
        return x


def _edges(hub: bool) -> Tensor:
    """In-degrees by a power law; ``hub``: a third of the edges end in one node."""
    weight = torch.arange(1, NODES + 1).float() ** -0.8
    ends = torch.stack([torch.randint(0, NODES, (EDGES,)),
                        torch.multinomial(weight, EDGES, replacement=True)])
    if hub:
        ends[1, :EDGES // 3] = 7
    return ends


def _lognormal(sigma: float) -> Tensor:
    return (torch.randn(NODES, WIDTH) * sigma).exp()


def _with(x: Tensor, change: Callable[[Tensor], None]) -> Tensor:
    change(x)
    return x


#: name -> (features, whether there is a hub)
CASES: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "normal": (lambda: torch.randn(NODES, WIDTH), False),
    "hubs": (lambda: torch.randn(NODES, WIDTH), True),
    "a third of the rows zero": (lambda: _with(torch.randn(NODES, WIDTH), lambda x: x[::3].zero_()),
                                 False),
    "lognormal, sigma 1": (lambda: _lognormal(1.0), False),
    "lognormal, sigma 2": (lambda: _lognormal(2.0), False),
    "lognormal, sigma 4": (lambda: _lognormal(4.0), False),
    "rows of sizes 1e-6 to 1e6": (lambda: torch.randn(NODES,
                                                      WIDTH) * 10 ** (torch.rand(NODES, 1) * 12
                                                                      - 6), False),
    "a channel 1000 times the others": (lambda: _with(torch.randn(NODES, WIDTH),
                                                      lambda x: x[:, 0].mul_(1000)), False),
    "an infinity in one row": (lambda: _with(torch.randn(NODES, WIDTH),
                                             lambda x: x[5, 5].fill_(float("inf"))), False),
}


def rows(device: str, say: Callable[[str], None]) -> list[dict]:
    """One dict per case, depth and precision."""
    found = []
    for name, (features, hub) in CASES.items():
        for depth in DEPTHS:
            torch.manual_seed(depth)
            x, edge_index, model = features().to(device), _edges(hub).to(device), Stack(depth).to(
                device)
            with gnnaccel.enabled(when="supported"), torch.no_grad():
                exact = model.double()(x.double(), edge_index)
                model.float()
                for form in ("bf16", "int8", "int8 per tensor"):
                    found.append({"case": name, "layers": depth, "precision": form,
                                  **_one(model, form, x, edge_index, exact)})
        say(f"{name}: done")
    return found


def _one(model: Stack, form: str, x: Tensor, edge_index: Tensor, exact: Tensor) -> dict:
    if form == "int8 per tensor":
        return {"median_row_error": _median_error(_per_tensor(model, x, edge_index), exact),
                "guard": None}
    mine = copy.deepcopy(model)
    gnnaccel.quantize(mine, form, guard={"every": 1})
    first = mine(x, edge_index)
    for _ in range(CALLS - 1):
        last = mine(x, edge_index)
    rows = gnnaccel.quant_report(mine).rows[:-1]
    return {"median_row_error": _median_error(first, exact),
            "median_row_error_after_the_guard": _median_error(last, exact),
            "guard": {row.name: row.reason for row in rows if row.guard == "failed"},
            "quantized_layers": len(rows), "layer_errors": [row.worst_error for row in rows],
            "outlier_rows": [row.outlier_rows for row in rows]}


def _per_tensor(model: Stack, x: Tensor, edge_index: Tensor) -> Tensor:
    """With one scale for all rows, which is what per-row scales are held against; the last layer in
    fp32 too."""
    src, dst = edge_index
    for i, linear in enumerate(model.linears):
        near = x
        if i + 1 < len(model.convs):
            scale = x.abs().amax() / 127
            near = (x / scale).round() * scale
        summed = torch.zeros_like(x).index_add(0, dst, near[src])
        x = F.relu(linear(summed))
    return x


def _median_error(got: Tensor, exact: Tensor) -> float | None:
    """Of rows that are finite and not zero; None where there are none."""
    size = exact.norm(dim=1)
    off = ((got.double() - exact).norm(dim=1) / size)[exact.isfinite().all(1) & (size > 0)]
    return float(off.median()) if off.numel() and not torch.isnan(off.median()) else None


def table(rows: list[dict]) -> str:
    """Markdown: a row per case and depth."""
    lines = ["| features | layers | bf16 | int8 per row | int8 per tensor | guard, of int8 |",
             "|---|---|---|---|---|---|"]
    for i in range(0, len(rows), 3):
        bf16, int8, tensor = rows[i:i + 3]
        failed, count = int8["guard"], int8["quantized_layers"]
        then = _percent(int8["median_row_error_after_the_guard"])
        guard = f"{len(failed)} of {count} back to fp32, {then} then" if failed else "passed"
        lines.append(
            f"| {bf16['case']} | {bf16['layers']} | {_percent(bf16['median_row_error'])} | "
                     f"{_percent(int8['median_row_error'])} | "
            f"{_percent(tensor['median_row_error'])} | {guard} |")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return ("-" if value is None else f"{100 * value:.2g} %"
            if value < 0.1 else f"{100 * value:.0f} %")
