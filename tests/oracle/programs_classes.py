"""Texts of users' layers, `MessagePassing` classes or plain modules, and of nets around them."""

from __future__ import annotations

from dataclasses import dataclass

from . import aggregates
from .graphs import IN, Draw
from .programs_text import Writer, used

_HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_geometric import utils
from torch_geometric.nn import GraphNorm, MessagePassing
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

scale = 0.5


def helper(a, b=None):
    return torch.tanh(a) if b is None else a * torch.sigmoid(b)


helped = helper


class Gated(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.lin, self.gate = nn.Linear(out, out), nn.Linear(out, out)

    def forward(self, x):
        return self.lin(x) * torch.sigmoid(self.gate(x))


class Layer({base}):
    def __init__(self, width, out):
        super().__init__({options})
        half = out // 2
        self.lin, self.lin2 = nn.Linear(width, out), nn.Linear(out, out)
        self.shared, self.frozen = nn.Linear(out, out), nn.Linear(out, out).requires_grad_(False)
        self.pair, self.last = nn.Linear(2 * out, out), nn.Linear(out, 1)
        self.to_one, self.edge_lin = nn.Linear(2 * out, 1), nn.Linear(3, out)
        self.mlp = nn.Sequential(nn.Linear(2 * out, 8), nn.ReLU(), nn.Linear(8, out))
        self.deep = nn.Sequential(nn.Linear(out + 1, 8), nn.SiLU(), nn.Linear(8, 8), nn.ReLU(),
                                  nn.Linear(8, out))
        self.heads = nn.ModuleList([nn.Linear(out, half) for _ in range(2)])
        self.gated, self.act, self.table = Gated(out), nn.LeakyReLU(0.1), nn.Embedding(3, out)
        self.W, self.bias = nn.Parameter(torch.randn(out, out) / 2), nn.Parameter(torch.randn(out))
        self.att = nn.Parameter(torch.randn(1, out))
        self.att2 = nn.Parameter(torch.randn(1, 2, half))
        self.att3, self.edge_att = nn.Parameter(torch.randn(1, 2, half)), nn.Linear(3, 2)
        self.ends = nn.Parameter(torch.randn(1, 2, 2 * half))
        self.mix = nn.Parameter(torch.randn(half, half))
        self.per_head = nn.Parameter(torch.randn(2, half, half))
        self.norm, self.stats = nn.LayerNorm(out), nn.BatchNorm1d(out)
        self.post = nn.Linear({times} * out, out)
        self.register_buffer("scale", torch.rand(out) + 0.5)
        self.eps, self.limit, self.drop, self.on = 0.3, 0.8, 0.0, True
        self.opts, self.rates = {{"slope": 0.2, "power": 1.0}}, [0.5, 2.0]
        self.nets = nn.ModuleDict({{"lin2": nn.Linear(out, out), "shared": Gated(out)}})
        self.fn, self.pick = torch.tanh, "lin2"
        self.kept = self.kept_too = None

    def way(self, x):
        return x * self.eps if self.on else self.gated(x)
{forward}
{methods}

class Net(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.conv, self.second = Layer(width, out), Layer(out, out)
        self.norm, self.batch, self.graph = nn.LayerNorm(out), nn.BatchNorm1d(out), GraphNorm(out)
        self.skip, self.drop = nn.Linear(width, out), 0.0

    def forward(self, x, edge_index, **given):
        h = self.conv(x, edge_index, **given)
{after}
        return h
"""
#: what follows a layer: of any width, and where results are as wide as features
_AFTER = (
    "h = h.relu()",
    "h = F.elu(h)",
    "h.relu_()",
    "h = self.norm(h)",
    "h = self.batch(h)",
    "h = self.graph(h)",
    "h = F.dropout(h, p=self.drop, training=self.training)",
    "h *= 0.5",
    "h += 1.0",
    "h = h + self.skip(x[:h.size(0)])",
    "h += self.skip(x)[:h.size(0)]",
    "h = self.second(h, edge_index, **given)",
    "h = F.normalize(h, dim=-1)",
    "h = h + self.second(h, edge_index, **given)",
    "h = self.second(h.relu(), edge_index, **given)",
)
_SAME = (
    "h += x[:h.size(0)]",
    "h = h + x[:h.size(0)]",
    "h = self.conv(h, edge_index, **given)",
    "h = h + self.conv(x, edge_index, **given)",
    "h[:, 0] += x[:h.size(0), 0]",
)
_AGGR = (
    "'add'",
    "'add'",
    "'sum'",
    "'mean'",
    "'mean'",
    "'max'",
    "'min'",
    "'softmax'",
    "'std'",
    "['mean', 'max']",
    "['sum', 'std']",
    "['add', 'min', 'mean']",
    "None",
)
_UPDATES = (
    "return aggr_out",
    "return F.relu(aggr_out)",
    "return aggr_out + self.bias",
    "aggr_out += 1\n        return aggr_out",
    "return self.shared(aggr_out)",
    "self.kept_too = aggr_out\n        return aggr_out * 2",
)
_CALLS = (
    "out = {p}",
    "out = {p}",
    "out = {p}",
    "out = self.propagate(edge_index, {x2})",
    "out = {p} + {q}",
    "out = {p}\n{q}\nout = out * 1.0",
    "x = {p}\nout = {q}",
    "out = {p}\nout = out + self.shared({q})",
    "out = {p}\nout += x",
    "out = {p}\nout = out + x",
    "out = {p}.mul_(0.5)",
    "out = {p}\nself.kept = out",
    "out = torch.sigmoid({q}) * {p}",
    "out = {p} * self.eps + self.bias",
    "out = {p}\nout = F.relu(out, inplace=True)",
    "out = {p}\nout[:, 0] = 1.0",
    "out = self.shared({p})",
)
_PLAIN_SUMS = (
    "torch.zeros_like(x).index_add_(0, index, {m})",
    "torch.zeros_like(x).index_add(0, index, {m})",
    "scatter({m}, index, 0, x.size(0), 'sum')",
    "scatter({m}, index, dim=0, dim_size=len(x), reduce='mean')",
    "scatter({m}, index, 0, x.size(0), 'max')",
    "x.new_zeros(x.size()).scatter_add_(0, index.unsqueeze(-1).expand_as({m}), {m})",
    "torch.zeros_like(x).scatter_add(0, index.view(-1, 1).expand(-1, {C}), {m})",
    "torch.zeros(x.size(0), {C}, device=x.device, dtype=x.dtype).index_add_(0, index, {m})",
    "x.clone().index_add_(0, index, {m})",
    "x.index_add(0, index, {m})",
    "torch.zeros_like(x).scatter_reduce(0, index.view(-1, 1).expand_as({m}), {m}, 'amax', "
    "include_self=False)",
    "torch.zeros_like(x).index_put((index,), {m}, accumulate=True)",
)


@dataclass(frozen=True)
class Program:
    """A text, and what its calls take."""

    text: str
    width: int  # of the results
    optional: bool  # features of edges may be left out
    bipartite: bool
    statements: int


def program(d: Draw, without: frozenset = frozenset()) -> Program:
    """A random one. ``without``: the numbers of its statements that are left out."""
    width = d.choice((4, 8, 8))
    made = _plain if d.chance(0.25) else _layer
    after = [
        d.choice(_AFTER + _SAME * 2 if width == IN else _AFTER)
        for _ in range(d.choice((0, 0, 1, 2)))
    ]
    return made(d, width, without, after)


def _text(after: list[str], without: frozenset, **parts) -> str:
    kept = [line for k, line in enumerate(after) if 100 + k not in without]
    body = "\n".join("        " + line for line in kept)
    return _HEAD.format(after=body, **parts)


def _indented(lines: list[str] | str) -> str:
    lines = lines.split("\n") if isinstance(lines, str) else lines
    return "\n".join("        " + line for one in lines for line in one.split("\n"))


def _layer(d: Draw, width: int, without: frozenset, after: list[str]) -> Program:
    headed, optional, bipartite = d.chance(0.2), d.chance(0.3), d.chance(0.15)
    writer = Writer(d, width, headed, optional, without)
    last = writer.statements(d.choice((1, 2, 3, 4, 5, 6, 8)))
    returned = writer.together(last, "heads" if headed else "wide")
    methods, extra = "", set()
    message = [*writer.lines, f"return {returned}"]
    if d.chance(0.3):
        message = writer.known_form()
    if d.chance(0.15):
        edges = Writer(d, width, headed, optional, frozenset(w - 20 for w in without))
        value = edges.as_kind(*edges.statements(d.choice((1, 2, 3))), "narrow")
        lines = [*edges.lines, f"return {value}"]
        methods = _method("edge_update", lines, optional) + "\n"
        shape = ".unsqueeze(-1)" if headed else ""
        message[-1] = f"return gate{shape} * ({message[-1].removeprefix('return ')})"
    methods += _method("message", message, optional, ["gate"] if "edge_update" in methods else [])
    aggr = "'add'" if headed else d.choice(_AGGR)
    if aggr == "None" or (not headed and not optional and d.chance(0.15)):
        found, extra = aggregates.method(d, False)
        methods, aggr = methods + "\n" + found, "'add'"
    elif d.chance(0.2):
        methods += f"\n    def update(self, aggr_out):\n        {d.choice(_UPDATES)}\n"
    times = aggr.count(",") + 1
    options = f"aggr={aggr}" + d.choice(("", "", ", flow='target_to_source'"))
    options += ", node_dim=0" if headed else d.choice(("", "", ", node_dim=0"))
    forward = _forward(d, methods, extra, width, headed, bipartite, times, optional, without)
    text = _text(
        after,
        without,
        base="MessagePassing",
        options=options,
        times=times,
        forward=forward,
        methods=methods,
    )
    return Program(text, width, optional, bipartite, len(writer.lines))


def _method(name: str, lines: list[str], optional: bool, more: list[str] = ()) -> str:
    taken = used("\n".join(lines)) + list(more)
    if not {"x_i", "x_j"} & set(taken):
        taken.append("x_j")
    taken.sort(key=lambda a: a == "factor" or (optional and a in ("edge_attr", "edge_weight")))
    optionals = ("edge_attr", "edge_weight") if optional else ()
    given = [f"{a}=0.7" if a == "factor" else f"{a}=None" if a in optionals else a for a in taken]
    return f"    def {name}(self, {', '.join(given)}):\n{_indented(lines)}\n"


def _forward(
    d: Draw,
    methods: str,
    extra: set[str],
    width: int,
    headed: bool,
    bipartite: bool,
    times: int,
    optional: bool,
    without: frozenset,
) -> str:
    lines = [
        d.choice(
            (
                "x = self.lin(x)",
                "x = self.lin(x)",
                "x = F.relu(self.lin(x))",
                "x = self.lin(x).tanh()",
            )
        )
    ]
    view = f".view(-1, 2, {width // 2})" if headed else ""
    passed = []
    if bipartite:
        lines.append("n = len(x) // 2 + 1")
        passed.append(f"x=(x{view}, x[:n]{view}), size=(len(x), n)")
    else:
        passed.append(
            d.choice(
                (
                    f"x=x{view}",
                    f"x=x{view}",
                    f"x=(x{view}, self.lin2(x){view})",
                    f"x=x{view}, size=None",
                )
            )
        )
    heads = methods + " ".join(extra)
    for name, value in (("h", "self.lin2(x)"), ("pos", "pos")):
        if used(heads, f"{name}_i", f"{name}_j"):
            passed.append(f"{name}=({value}, {value}[:n])" if bipartite else f"{name}={value}")
    passed += [f"{a}={a}" for a in ("edge_attr", "edge_weight", "kind") if used(heads, a)]
    passed += ["own=x[:n]" if bipartite else "own=x"] if "own" in extra else []
    if used(methods, "norm") or "norm" in extra:
        end = d.choice((0, 1))
        lines += [
            f"row, col = edge_index[{end}], edge_index[{1 - end}]",
            "deg = degree(col, x.size(0), dtype=x.dtype).clamp(min=1)",
            "norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]",
        ]
        passed.append("norm=norm")
    if used(methods, "factor") and d.chance(0.5):
        passed.append("factor=self.eps")
    passed = ", ".join(passed)
    if "def edge_update" in methods:
        lines.append(f"gate = self.edge_updater(edge_index, {passed})")
        passed += ", gate=gate"
    narrow = bipartite or headed or times > 1
    call = _CALLS[0] if 200 in without else d.choice(_CALLS[:3] if narrow else _CALLS)
    first = f"self.propagate(edge_index, {passed})"
    second = first.replace("x=x", d.choice(("x=x", "x=x * 2", "x=self.lin2(x)")), 1)
    lines.append(call.replace("{p}", first).replace("{q}", second).replace("{x2}", passed))
    lines += [f"out = out.view(-1, {width})"] if headed else []
    lines.append("return self.post(out)" if times > 1 else "return out")
    given = "edge_attr=None, edge_weight=None, kind=None, pos=None"
    return f"\n    def forward(self, x, edge_index, {given}):\n{_indented(lines)}\n"


def _plain(d: Draw, width: int, without: frozenset, after: list[str]) -> Program:
    optional = d.chance(0.3)
    writer = Writer(d, width, False, optional, without)
    last = writer.together(writer.statements(d.choice((1, 2, 3, 4, 5, 6))), "wide")
    body = "\n".join(writer.lines) + "\n" + last
    ends = d.choice(
        (
            "row, col = edge_index",
            "col, row = edge_index",
            "row, col = edge_index[0], edge_index[1]",
        )
    )
    lines = [d.choice(("x = self.lin(x)", "x = F.relu(self.lin(x))")), ends]
    index = "index, other = col, row" if d.chance(0.5) else "index, other = row, col"
    lines += [
        index,
        "size_i, ptr = x.size(0), None",
        d.choice(
            (
                "x_i, x_j = x[index], x[other]",
                "x_i = x[index]\nx_j = x.index_select(0, other)",
                "x_j = x[other]\nx_i = x.index_select(0, index)",
            )
        ),
    ]
    if used(body, "h_i", "h_j"):
        lines += ["h = self.lin2(x)", "h_i, h_j = h[index], h[other]"]
    lines += ["pos_i, pos_j = pos[index], pos[other]"] if used(body, "pos_i", "pos_j") else []
    lines += (
        ["deg = degree(index, x.size(0), dtype=x.dtype).clamp(min=1)", "norm = 1.0 / deg[index]"]
        if used(body, "norm")
        else []
    )
    lines += ["factor = self.eps"] if used(body, "factor") else []
    lines += writer.lines + [f"m = {last}"]
    sum_ = d.choice(_PLAIN_SUMS).replace("{C}", str(width)).replace("{m}", "m")
    lines.append(f"out = {sum_}")
    lines.append(
        d.choice(
            (
                "return out",
                "return out + x",
                "out += x\nreturn out",
                "return self.shared(out)",
                "return self.pair(torch.cat([x, out], -1))",
                "return F.relu(out)",
                "self.kept_too = m\nreturn out",
                "t = scatter(out[other], index, 0, size_i, 'sum')\nreturn t + out",
                "return out / degree(index, size_i, dtype=x.dtype).clamp(min=1).unsqueeze(-1)",
            )
        )
    )
    given = "edge_attr=None, edge_weight=None, kind=None, pos=None"
    forward = f"\n    def forward(self, x, edge_index, {given}):\n{_indented(lines)}\n"
    text = _text(after, without, base="nn.Module", options="", times=1, forward=forward, methods="")
    return Program(text, width, optional, False, len(writer.lines))
