"""Random ``aggregate`` methods as users write them."""

from __future__ import annotations

import re

from .graphs import Draw

_VALUES = ("{m}", "{m}", "{m}", "{m} * x_j", "x_i * {m}", "{m} - x_i", "{m}.abs()",
           "F.relu({m})", "{m} * {m}", "torch.exp(0.1 * {m})", "edge_attr[:, :1] * {m}",
           "edge_weight.view(-1, 1) * {m}", "{m} / (1.0 + x_j.abs())",
           "self.pair(torch.cat([{m}, x_j], -1))", "torch.where({m} > 0, {m}, x_i)", "x_j",
           "self.eps * {m} + x_j.tanh()")
_ODD_VALUES = ("{m} * {m}.shape[0]", "{m} / index.numel()", "{m}.cumsum(0)", "{m}.flip(0)",
               "F.dropout({m}, 0.5, True)", "helper({m})", "({m} if ptr is None else -{m})",
               "{m}.mul_(0.5)", "edge_attr.mean(-1, keepdim=True)")
_SUMS = ("scatter({v}, index, 0, dim_size, reduce='{r}')",
         "scatter({v}, index, dim=self.node_dim, dim_size=dim_size, reduce='{r}')",
         "utils.scatter({v}, index, dim=0, dim_size=dim_size, reduce='{r}')",
         "scatter({v}, index, 0, own.shape[0], '{r}')",
         "scatter({v}, index, dim_size=own.size(0), reduce='{r}')",
         "self.aggr_module({v}, index, ptr=ptr, dim_size=dim_size, dim=self.node_dim)",
         "super().aggregate({v}, index, ptr, dim_size)",
         "super().aggregate({v}, index, dim_size=dim_size)",
         "sum(scatter(one, index, 0, dim_size) for one in ({v},))",
         "[scatter(one, index, 0, dim_size, '{r}') for one in ({v}, {m})][0]")
_REDUCES = ("sum", "sum", "add", "mean", "max", "min")
_OF_ONE = ("{a}", "{a}", "F.relu({a})", "{a} * self.att", "{a} - {a}.mean(-1, keepdim=True)",
           "{a}.clamp(min=-0.5)", "self.act({a} * scale)", "{a} + own", "self.lin2({a})",
           "({a} if self.training else {a} * 2)", "{a} * (own > 0).float()",
           "{a}.view(-1, {a}.size(-1))", "F.normalize({a} + 2.0, dim=-1)")
_OF_TWO = ("{a} / ({b}.abs() + 0.1)", "{a} + {b}", "{a} - {b} * scale",
           "self.pair(torch.cat([{a}, {b}], dim=-1))",
           "torch.where({a} > 0.7 * {b}, {a}, 0.1 * {b})", "torch.maximum({a}, {b})")
_ODD = ("{a} += 1\nout = {a}", "out = {a}.add_(1.0)", "out = {a}\nout[0] = 0.5",
        "out = {a} / dim_size", "out = {a} + {a}.mean(0)", "out = {a} * {a}.shape[0]",
        "out = {a} + scatter({a}[index], index, 0, dim_size)", "out = F.dropout({a}, 0.5, True)",
        "out = {a} if {a}.sum() > 0 else -{a}", "self.kept = {a}\nout = {a}",
        "out = next(row for row in {a}) + {a}")
_ARGUMENTS = ("index", "ptr", "dim_size", "x_i", "x_j", "own", "edge_attr", "edge_weight")


def method(d: Draw, pair: bool) -> tuple[str, set[str]]:
    """The lines of an ``aggregate``, and the arguments that it takes. ``pair``: messages are."""
    names = ("one", "two") if pair else ("inputs",)
    lines = ["one, two = inputs"] if pair else []
    for name in ("a", "b")[: 1 + (pair or d.chance(0.5))]:
        value = d.choice(_ODD_VALUES if d.chance(0.1) else _VALUES)
        sent = names[-1] if name == "b" else names[0]
        reduction = d.choice(_SUMS).replace("{r}", d.choice(_REDUCES))
        lines.append(f"{name} = " + reduction.replace("{v}", value).replace("{m}", sent))
    if len(lines) > 1 + pair:
        lines.append("a = " + d.choice(_OF_TWO).format(a="a", b="b"))
    if d.chance(0.15):
        lines += d.choice(_ODD).format(a="a").split("\n")
    else:
        lines.append("out = " + d.choice(_OF_ONE).format(a="a"))
    lines.append("return out")
    used = {name for name in _ARGUMENTS if re.search(rf"\b{name}\b", "\n".join(lines))}
    given = ", ".join(sorted(used))
    body = "".join(f"\n        {line}" for line in lines)
    return f"    def aggregate(self, inputs, {given}):{body}\n", used
