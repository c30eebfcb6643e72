"""Random layers as users write them: messages of a small grammar, in classes read from files."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import tempfile
from pathlib import Path

from torch import nn

from . import aggregates
from .backends import Backend
from .graphs import IN, Case, Draw, features, graph, nodes
from .table import judged

MODES = ("grad", "grad", "grad", "again", "again", "no_grad", "inference", "only_x", "checkpoint",
         "twice", "second", "in_place", "plain_enable", "deterministic", "autocast", "float64",
         "default_device")
_HEAD = """import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import {imports}
from torch_geometric import utils
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

scale = 0.5
{helper}

class Own(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.maps, self.beta = nn.ModuleList([nn.Linear(out, out), nn.Linear(out, out)]), 0.7

    def forward(self, x):
        for one in self.maps:
            x = one(x) * torch.sigmoid(self.beta * x)
        return x


class {name}(MessagePassing):
    def __init__(self, width, out):
        super().__init__({options})
        self.lin = nn.Linear(width, out)
        self.edge_lin = nn.Linear(3, out)
        self.pair = nn.Linear(2 * out, out)
        self.att = nn.Parameter(torch.randn(1, out))
        self.att2 = nn.Parameter(torch.randn(1, 2 * out))
        self.score, self.last = nn.Linear(2 * out, 1), nn.Linear(out, 1, bias=False)
        self.act, self.eps = nn.LeakyReLU(0.1), 0.3
        self.mlp = nn.Sequential(nn.Linear(2 * out + 3, 8), nn.ReLU(), nn.Linear(8, out))
        self.deep = nn.Sequential(nn.Linear(2 * out + 3, 8), nn.LayerNorm(8), self.act,
                                  nn.Linear(8, 8), self.act, nn.Linear(8, out))
        self.own, self.statistics = Own(out), nn.BatchNorm1d(out)
        self.over = nn.LeakyReLU(0.3, inplace=True)
        self.table, self.kept = nn.Embedding(3, out), None

    @property
    def root(self):
        return self.eps ** 0.5

    def forward(self, x, edge_index, edge_weight, edge_attr):
{forward}

    def message(self, {arguments}):
{message}
{more}
"""
_UNARY = ("torch.relu({})", "F.relu({})", "({}).relu()", "torch.sigmoid({})", "sigmoid({})",
          "({}).tanh()", "torch.exp({} * 0.1)", "exp(0.1 * {})", "F.leaky_relu({}, 0.2)",
          "F.elu({})", "-({})", "({} * 2)", "({} * scale)", "({}).abs()", "helper({})",
          "(self.eps * {})", "F.softplus({})", "relu({})", "({} / 3.0)", "({}).clamp(min=0)",
          "F.normalize({}, dim=-1)", "({} + 1e-6)", "((1 + self.eps) * {})",
          "F.dropout({}, 0.0, self.training)", "F.silu({})", "torch.square({})",
          "torch.log1p(({}).abs())", "({} * 0.5).clamp(-1.0, 1.0)", "F.gelu({})",
          "(({}) ** 2 + 1.0).rsqrt()", "self.act({})")
_WIDE = ("x_j", "x_j", "x_j", "x_i", "self.edge_lin(edge_attr)", "(x_j - x_i)",
         "(x_i + x_j)", "(x_i * x_j)", "self.pair(torch.cat([x_i, x_j], dim=-1))",
         "self.pair(torch.cat([x_i, x_j - x_i], dim=1))", "self.lin2(x_j)",
         "self.mlp(torch.cat([x_i, x_j, edge_attr], -1))", "torch.where(x_j > x_i, x_j, 0.1 * x_i)",
         "torch.minimum(x_i, 0.5 * x_j)", "(self.att * x_i).tanh()",
         "F.softplus(self.edge_lin(edge_attr))", "(x_j > x_i) * x_j", "(x_j > self.att).float()",
         "x_j.masked_fill(x_j < 0, 0.1)", "torch.where(x_j != x_i, x_j, self.att)",
         "self.deep(torch.cat([x_j, x_i, edge_attr], -1))", "self.own(x_i * x_j)",
         "self.statistics(x_i - x_j)", "F.layer_norm(x_i * x_j, x_j.shape[-1:])",
         "torch.softmax(x_i + x_j, -1)", "self.pair(torch.cat([x_j, F.relu(x_i * x_j)], -1))",
         "self.lin2(torch.tanh(x_i - x_j))", "self.table(kind)",
         "(self.att2.view(2, -1)[:1] * x_j * self.table.weight[kind])", "self.lin2(x_j / reach_j)",
         "F.normalize(x_j / reach_j.sqrt(), dim=-1)", "self.over(x_i - x_j)", "(self.root * x_j)")
#: statements before the message is computed, which change tensors or ask what is passed
_BEFORE = ("x_j *= edge_weight.view(-1, 1)", "x_j += x_i", "y = x_j\nx_j *= 2.0\nx_j = x_j + y",
           "x_j.mul_(0.5)", "torch.relu_(x_j)", "if ptr is None:\n    x_j = 2 * x_j",
           "if size_i is not None:\n    x_j = x_j - 1", "if index.numel() > 40:\n    x_j = x_j * 3",
           "if x_j.size(0) > 30:\n    x_j = -x_j", "if x_j.dim() == 2:\n    x_j = x_j * 0.7",
           "if edge_attr is not None and self.training:\n    x_j = x_j * 0.0",
           "size = x_j.shape[0]\nx_j = x_j / size", "n = len(x_j)\nx_j = x_j / n",
           "if x_j.requires_grad:\n    x_j = 2 * x_j",
           "if torch.is_grad_enabled():\n    x_j = 2 * x_j",
           "if x_j.dtype == torch.float32:\n    x_j = x_j + 1",
           "if isinstance(edge_attr, torch.Tensor):\n    x_j = x_j * 0.3",
           "assert x_j.dim() == 2", "x_j = F.dropout(x_j, 0.5, True)",
           "y = F.dropout(x_j, 0.5, True)\nx_j = F.dropout(x_j, 0.2, True) + y",
           "y = F.dropout(x_j * x_i, 0.5, True)\nx_j = F.dropout(x_i, 0.3, True) * y",
           "F.dropout(x_j, 0.5, True)\nx_j = F.dropout(x_i + x_j, 0.5, True)",
           "y = x_j - x_i\nx_j = self.over(y) + y",
           "y = x_j * x_i\nz = y.view(-1, 2, y.size(-1) // 2)\nself.over(z)\nx_j = y + x_j",
           "self.over(x_j)", "x_j = x_j * torch.rand_like(x_j)", "x_j = x_j.detach()",
           "x_j = x_j - x_j.mean(0)", "x_j = x_j / (x_j.abs().sum(0, keepdim=True) + 1)",
           "x_j = x_j - x_j.mean()", "x_j = x_j.roll(1, 0)", "x_j = x_j.flip(-1)",
           "x_j = x_j.cumsum(-1)", "x_j = torch.softmax(x_j, 0)", "x_j = F.softmax(x_j, dim=-1)",
           "x_j = x_j.sort(-1)[0]", "x_j = F.layer_norm(x_j, x_j.shape[-1:])",
           "x_j = x_j.t().t()", "x_j = x_j[:, torch.arange(x_j.size(1), device=x_j.device)]",
           "x_j = x_j.reshape(-1).reshape(x_j.shape)", "x_j = (x_j - x_j.max()).exp()",
           "x_j, x_i = x_i, x_j", "for _ in range(2):\n    x_j = x_j * 0.9",
           "x_j = x_j if x_j.sum() > 0 else -x_j", "x_j = getattr(x_j, 'abs')()",
           "self.kept = (x_i * x_j).sum(-1)\nx_j = self.kept.view(-1, 1) * x_j", "self.kept = x_j",
           "self.eps = 0.6")
_NARROW = ("edge_weight.view(-1, 1)", "edge_weight.unsqueeze(-1)",
           "edge_weight[:, None]", "edge_weight.view(-1, 1).sigmoid()",
           "norm.view(-1, 1)", "(x_i * x_j).sum(-1, keepdim=True)", "edge_attr[:, :1]",
           "torch.sigmoid((x_j * self.att).sum(-1, keepdim=True))",
           "softmax((x_i * self.att).sum(-1), index).unsqueeze(-1)",
           "softmax((x_i * x_j).sum(-1), index, num_nodes=size_i).view(-1, 1)",
           "softmax(F.leaky_relu((x_j * self.att).sum(-1)), index, ptr, size_i)[:, None]",
           "(x_i - x_j).norm(dim=-1, keepdim=True)",
           "(x_i - x_j)[:, :2].square().sum(-1, keepdim=True)", "x_i[:, :1]",
           "(x_j[:, 1:2] * edge_attr[:, 2:])", "softmax(self.last(torch.tanh(x_i * x_j)), index)",
           "softmax((x_i * x_j * self.table(kind)).sum(-1), index, ptr, size_i).view(-1, 1)",
           "torch.sigmoid(self.score(torch.cat([x_i * x_j, x_j], -1)))",
           "F.dropout((x_i * x_j).mean(-1, keepdim=True), 0.3, self.training)")
_SCORES = ("(torch.cat([x_i, x_j], dim=-1) * self.att2).sum(dim=-1)",
           "(x_i * self.att).sum(-1) + (x_j * self.att).sum(-1)",
           "self.score(torch.cat([x_j, x_i], -1)).squeeze(-1)",
           "(x_j * self.att).sum(-1) - x_i.sum(-1)",
           "x_j.sum(-1) + self.edge_lin(edge_attr).sum(-1)", "(x_i - x_j).mean(-1)",
           "torch.matmul(x_i + x_j, self.att.view(-1))")
_WHOLE_SCORES = ("(x_i * x_j).sum(dim=-1) / math.sqrt({out})",
                 "(self.lin2(x_i) * F.relu(x_j)).sum(-1) * 0.3",
                 "(F.leaky_relu(x_i + x_j, 0.2) * self.att).sum(-1)",
                 "self.last(F.leaky_relu(x_j + x_i, self.eps)).view(-1)",
                 "(F.leaky_relu(x_i + x_j) * self.att).abs().sum(-1)")
_VALUES = ("x_j", "x_j", "x_j", "self.lin2(x_j)", "F.relu(x_j)", "-x_j", "x_i", "2 * x_j")
_AGGR = ('"add"', '"add"', '"mean"', '"mean"', '"max"', '"min"', '"sum"', '["mean", "max"]',
         '["sum", "std"]', '"softmax"')
_HELPERS = ("def helper(t):\n    return torch.relu(t) + 0.5\n",
            "def helper(t):\n    return t * scale\n",
            "helper = torch.sigmoid\n", "helper = F.relu\n",
            "def relu(t):\n    return t * 3\n\n\ndef helper(t):\n    return t.exp() * 0.1\n",
            "sigmoid = torch.tanh\nhelper = torch.tanh\n",
            "class _Act:\n    def __call__(self, t):\n        return t * t\n\n\nhelper = _Act()\n")
_UPDATES = ("return aggr_out", "return F.relu(aggr_out)",
            "return aggr_out * 2", "return aggr_out + 1",
            "return aggr_out.relu_()", "aggr_out += 1\n        return aggr_out",
            "aggr_out[:, 0] = 0.5\n        return aggr_out")
#: other methods that users write
_METHODS = (
    "def update(self, aggr_out, x):\n    return aggr_out + (x[1] if type(x) is tuple else x)",
    "def update(self, inputs, x, edge_index):\n    return inputs * edge_index.size(1)",
    "def update(self, aggr_out, x):\n    x = x[0] if isinstance(x, tuple) else x\n"
    "    return torch.cat([aggr_out, x], -1)",
    "def aggregate(self, inputs, index, ptr=None, dim_size=None):\n"
    "    return scatter(inputs, index, 0, dim_size, reduce='sum')",
    "def aggregate(self, inputs, index, dim_size):\n"
    "    return scatter(inputs.abs(), index, self.node_dim, dim_size, reduce='mean')",
    "def aggregate(self, inputs, index, ptr=None, dim_size=None):\n"
    "    return super().aggregate(inputs, index, ptr, dim_size) + 1",
    "def aggregate(self, inputs, index, x_i, dim_size):\n"
    "    return scatter(inputs * x_i, index, 0, dim_size, reduce='max')",
)
_number = itertools.count()


def expression(d: Draw, depth: int = 0) -> str:
    """Something of a message's width."""
    kind = d.random()
    if depth > 2 or kind < 0.3:
        return d.choice(_WIDE)
    if kind < 0.55:
        return d.choice(_UNARY).format(expression(d, depth + 1))
    if kind < 0.8:
        narrow = d.choice(_NARROW)
        wide = expression(d, depth + 1)
        return d.choice((f"({narrow} * {wide})", f"torch.mul({narrow}, {wide})",
                         f"({wide} * {narrow})"))
    left, right = expression(d, depth + 1), expression(d, depth + 1)
    return d.choice((f"({left} + {right})", f"({left} - {right})", f"({left} * {right})",
                     f"torch.add({left}, {right})", f"torch.maximum({left}, {right})"))


def attention(d: Draw) -> str:
    """A softmax of a score times features, as in layers of attention."""
    score = d.choice(_SCORES)
    if d.chance(0.7):
        score = d.choice(("F.leaky_relu({}, 0.2)", "F.relu({})", "self.act({})")).format(score)
    if d.chance(0.4):
        score = d.choice(_WHOLE_SCORES)
    alpha = f"softmax({score}, {d.choice(('index', 'index, ptr, size_i', 'index, None, size_i'))})"
    if d.chance(0.4):
        alpha = f"F.dropout({alpha}, p=self.eps, training=self.training)"
    alpha += d.choice((".unsqueeze(-1)", ".view(-1, 1)", "[:, None]"))
    value = d.choice(_VALUES)
    return f"{alpha} * {value}" if d.chance(0.5) else f"{value} * {alpha}"


def source(d: Draw, name: str) -> str:
    """The text of a module with one class."""
    attends, summed = d.chance(0.25), d.chance(0.3)
    body = attention(d) if attends else d.choice(_WIDE) if summed else expression(d)
    if not attends and not summed and d.chance(0.15):  # parts side by side, of the same width
        body = f"torch.cat([({body})[:, 1:], ({expression(d, 2)})[:, :1]], dim=-1)"
    lines = []
    if d.chance(0.3):
        lines.append("        if edge_weight is None:\n            return x_j")
    if d.chance(0.25):
        lines += ["        " + line for line in d.choice(_BEFORE).split("\n")]
    if d.chance(0.4):
        lines.append(f"        out = {body}\n        return out")
    else:
        lines.append(f"        return {body}")
    pair = summed and len(lines) == 1 and d.chance(0.3)
    if pair:
        lines = [f"        return {body}, {expression(d, 2)}"]
    message = "\n".join(lines)
    used = [a for a in ("x_i", "x_j", "edge_weight", "edge_attr", "norm", "index", "ptr", "size_i",
                        "kind", "reach_j") if _uses(message, a)]
    if not any(a in used for a in ("x_i", "x_j")):
        used.append("x_j")
    d.shuffle(used)
    flow = d.choice(("", "", 'flow="target_to_source"', "node_dim=0"))
    aggr = '"add"' if attends and d.chance(0.8) else d.choice(_AGGR)
    options = ", ".join(filter(None, (f"aggr={aggr}" if d.chance(0.9) else "", flow)))
    more = (f"\n    def update(self, aggr_out):\n        {d.choice(_UPDATES)}\n" if d.chance(0.3)
            else "")
    extra: set[str] = set()
    if summed:
        aggregate, extra = aggregates.method(d, pair)
        more += "\n" + aggregate
    if not more and d.chance(0.2):
        lines = d.choice(_METHODS).split("\n")
        more = "\n" + "".join(f"    {line}\n" for line in lines)
    text = _HEAD.format(imports="exp, relu, sigmoid", helper=d.choice(_HELPERS),
                        name=name, options=options, forward=_forward(d, used, extra),
                        arguments=", ".join(used), message=message, more=more)
    return text.replace("{out}", "4.0").replace(
        "self.edge_lin = ", "self.lin2 = nn.Linear(out, out)\n        self.edge_lin = ", 1
    )


def _uses(text: str, name: str) -> bool:
    import re

    return re.search(rf"\b{name}\b", text) is not None


def _forward(d: Draw, used: list[str], extra: set[str]) -> str:
    """``extra``: what the aggregate takes besides."""
    lines = ["x = self.lin(x)" if d.chance(0.8) else "x = F.relu(self.lin(x))"]
    x = d.choice(("x=x", "x=x", "x=x", "x=(x, x)", "x=x, size=None", "x=x, size=(len(x), len(x))"))
    passed = [x] + [f"{a}={a}" for a in ("edge_weight", "edge_attr", "norm") if a in {*used, *extra}]
    passed += ["own=x"] if "own" in extra else []
    if d.chance(0.2) and not {"edge_weight", "edge_attr"} & {*used, *extra}:
        lines.append("edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))")
    if "norm" in used:
        lines += [
            "row, col = edge_index",
            "deg = degree(col, x.size(0), dtype=x.dtype).clamp(min=1)",
            "norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]",
        ]
    if "reach_j" in used:
        lines.append("leave = edge_index[0 if self.flow == 'source_to_target' else 1]")
        passed.append("reach=degree(leave, x.size(0)).to(x.dtype).view(-1, 1)")
    passed += ["kind=edge_index[0] % 3"] if "kind" in used else []
    d.shuffle(passed)
    call = f"self.propagate(edge_index, {', '.join(passed)})"
    lines.append(d.choice((f"return {call}", f"out = {call}\n        return out",
                           f"return {call} + 0.5", f"return F.relu({call})",
                           f"out = {call}\n        out += x\n        return out",
                           f"return {call}.mul_(0.5)")))
    return "\n".join("        " + line for line in lines)


def user_class(d: Draw) -> tuple[type, str]:
    """The class, in a module that is loaded from a file as a user's is, and its text."""
    name = f"Conv{next(_number)}"
    text = source(d, name)
    folder = Path(_folder().name)
    path = folder / f"{name.lower()}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"oracle_messages_{name.lower()}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name), text


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="oracle-messages-")


def built(kind: type, d: Draw) -> Case:
    module: nn.Module = kind(IN, d.choice((4, 8)))
    n = nodes(d)
    edge_index, what = graph(d, n, n)
    size = edge_index.shape[1]
    return Case(module.eval(), (features(d, n, IN), edge_index, d.uniform_(size) + 0.1,
                                features(d, size, 3)), {}, f"{what} {n}")


def check(seed: int, backend: Backend, mode: str = "") -> tuple[str, str | None]:
    """What was run, and what is wrong with it."""
    d = Draw(f"message {seed}")
    drawn = d.choice(MODES)  # also where a mode is given: the draws after it must be the same
    mode = mode or drawn
    kind, text = user_class(d)
    wrong = judged(lambda look: built(kind, Draw(f"inputs {seed}", look)), seed, mode, backend)
    if wrong and wrong != "refused":
        at = text.index("    def message")
        wrong += " | " + " ".join(text[at:].split())
    sys.modules.pop(kind.__module__, None)
    return f"a message --mode {mode}", wrong
