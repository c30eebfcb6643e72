"""Statements of messages as users write them, one after another, each of what came before.

A value is one of four kinds: "wide" [E, C], "narrow" [E, 1], "flat" [E] and "heads" [E, 2, C / 2].
A statement names values by the first letter of their kind, as ``{w}``; each is drawn for itself. A
statement that is left out gives what its kind has without it, so that all others stay.
"""

from __future__ import annotations

import re

from .graphs import Draw

WIDE = (
    "torch.relu({w})", "{w}.tanh()", "F.silu({w}) * 0.7", "torch.sigmoid({w}) * {w}",
    "{w}.abs().sqrt()",
    "(0.1 * {w}).exp()", "F.leaky_relu({w}, self.opts['slope'])", "{w} * self.eps", "-{w}",
    "{w} * self.rates[0] + self.rates[-1]", "{w} + {w}", "{w} - {w}", "{w} * {w}", "{w} * {n}",
    "{n} * {w}", "{w} * {f}.unsqueeze(-1)", "{f}.view(-1, 1) * {w}", "{f}[:, None] + {w}",
    "{w} / (1.0 + {w}.abs())", "torch.maximum({w}, {w})", "torch.where({w} > {w}, {w}, 0.3 * {w})",
    "{w}.clamp(min=-0.5, max=self.limit)", "({w} > 0).to({w}.dtype) * {w}",
    "{w}.masked_fill({w} < self.scale, 0.1)", "{w} * self.scale", "{w} + self.bias",
    "self.att * {w}",
    "self.shared({w})", "self.shared({w}) + self.shared({w})", "self.frozen({w})",
    "F.linear({w}, self.W)", "F.linear({w}, self.W, self.bias)", "{w} @ self.W",
    "torch.matmul({w}, self.W.t())", "torch.einsum('ec,cd->ed', {w}, self.W)",
    "self.pair(torch.cat([{w}, {w}], dim=-1))", "self.mlp(torch.cat([{w}, {w}], -1))",
    "self.mlp(torch.cat((x_i, x_j - x_i), 1))", "self.deep(torch.cat([{w}, {n}], -1))",
    "torch.stack([{w}, {w}], dim=1).sum(1)", "torch.stack([{w}, {w}, x_j], -1).mean(-1)",
    "torch.stack((x_i, {w}), 0)[1]", "torch.cat([{w}[:, 1:], {w}[:, :1]], dim=-1)",
    "torch.cat({w}.chunk(2, dim=-1)[::-1], -1)", "torch.cat([{w}[..., {D}:], {h}[:, 0]], -1)",
    "{h}.reshape(-1, {C})", "{h}.flatten(1)", "{h}.transpose(1, 2).reshape(-1, {C})",
    "{w}.view(-1, {D}, 2).permute(0, 2, 1).reshape(-1, {C})", "{n}.expand(-1, {C}) * {w}",
    "{n}.expand_as({w})", "{w} - {w}.mean(-1, keepdim=True)", "F.normalize({w}, dim=-1)",
    "F.layer_norm({w}, ({C},))", "self.norm({w})", "self.stats({w})", "F.softmax({w}, dim=-1)",
    "F.dropout({w}, 0.0, self.training)", "F.dropout({w}, p=self.drop, training=self.training)",
    "self.table(kind)", "self.table.weight[kind] * {w}", "self.table(kind) + {w}",
    "self.edge_lin(edge_attr)", "{w} + self.edge_lin(edge_attr)",
    "self.edge_lin(edge_attr).relu() * {w}",
    "{w} * edge_weight.view(-1, 1)", "softmax({w}, index, ptr, size_i) * {w}",
    "softmax({w}, index)",
    "softmax({w}, index, num_nodes=size_i)", "h_j * {w}", "h_i - {w}", "h_j + h_i * {w}",
    "({w} * self.att).sum(-1, keepdim=True) * {w}", "{w} * norm.view(-1, 1)", "{w} * factor",
    "{w} ** 2", "torch.addcmul({w}, {w}, {w}, value=0.5)", "torch.lerp({w}, {w}, 0.3)",
    "self.act({w})", "self.gated({w}) if self.on else {w}", "helper({w})", "helper({w}, {w})",
    "torch.cat([head({w}) for head in self.heads], -1)", "{w}.clone()", "self.fn({w})",
    "self.nets[self.pick]({w})", "{w} @ self.shared.weight.t() + self.shared.bias", "{w} * scale",
    "getattr(self, self.pick)({w})", "F.linear({w}, self.shared.weight * self.eps)",
    "self.way({w})",
    "sum(w * {w} for w in self.rates)",
)
NARROW = (
    "({w} * {w}).sum(-1, keepdim=True)", "{w}.mean(-1, keepdim=True)", "self.last({w})",
    "{w}.norm(dim=-1, keepdim=True)", "(pos_i - pos_j).square().sum(-1, keepdim=True)",
    "{w}.max(dim=-1, keepdim=True)[0]", "{w}.amax(-1, keepdim=True)", "{f}.unsqueeze(-1)",
    "{f}.view(-1, 1)", "torch.sigmoid({n})", "{n} * {n}", "{n} + {f}[:, None]", "{w}[:, 1:2]",
    "softmax({n}, index, ptr, size_i)", "softmax({n}, index)", "edge_weight.view(-1, 1)",
    "self.last(torch.tanh({w} + {w}))", "edge_attr[:, :1] * {n}", "(-{n}.abs()).exp()",
    "torch.cos({n} * self.eps)", "1.0 / (1.0 + {n} ** 2)", "({n} < self.limit) * {n}",
    "F.linear({w}, self.att)", "{w} @ self.att.t()", "({w} - {w}).pow(2).sum(-1, keepdim=True)",
    "self.to_one(torch.cat([{w}, {w}], -1))", "(pos_j - pos_i).norm(dim=-1).unsqueeze(-1)",
)
FLAT = (
    "({w} * self.att).sum(-1)", "({w} * {w}).sum(dim=-1) / {D}", "self.last({w}).squeeze(-1)",
    "{n}.view(-1)", "{n}[:, 0]", "softmax({f}, index, ptr, size_i)", "softmax({f}, index)",
    "softmax(F.leaky_relu({f}, self.opts['slope']), index, num_nodes=size_i)", "edge_weight * {f}",
    "{w}.norm(dim=1)", "torch.einsum('ec,ec->e', {w}, {w})", "{f}.sigmoid()", "{f} * {f}",
    "{w}[:, 0] - {w}[:, -1]", "{h}.sum((1, 2))", "torch.cosine_similarity({w}, {w}, dim=-1)",
    "({h} * self.att2).sum(-1).mean(1)", "norm * {f}", "{w} @ self.bias",
)
HEADS = (
    "{w}.view(-1, 2, {D})", "{w}.view(-1, 2, {D}) * self.att2",
    "{w}.reshape(-1, {D}, 2).transpose(1, 2)",
    "{h} * {h}", "{h} * {n}.unsqueeze(1)", "{h} * {f}.view(-1, 1, 1)",
    "softmax(({h} * self.att2).sum(-1), index, ptr, size_i).unsqueeze(-1) * {h}",
    "F.leaky_relu({h}, 0.2) + {h}", "{h}.flip(1)", "{h} @ self.mix",
    "torch.einsum('ehd,dk->ehk', {h}, self.mix)",
    "torch.einsum('ehd,hdk->ehk', {h}, self.per_head)",
    "{h} - {h}.mean(1, keepdim=True)", "torch.stack([{w}[:, :{D}], {w}[:, {D}:]], 1)",
    "{w}.unsqueeze(1).expand(-1, 2, -1)[..., :{D}]", "({h} * {h}).sum(-1, keepdim=True) * {h}",
    "F.dropout(softmax({h}.sum(-1), index), 0.0, self.training)[..., None] * {h}",
    "{h} * {h}.softmax(1)", "torch.where({h} > 0, {h}, self.opts['slope'] * {h})",
)
#: what changes, keeps or asks for values, and gives none
OTHERS = (
    "{W} += {w}", "{W} *= {n}", "{W}.mul_(0.5)", "{W}.add_({w}, alpha=self.eps)", "{W}[:, 0] = 0.5",
    "{W}[:, :2] *= 2", "torch.relu_({W})", "{W}.clamp_(min=-0.7)", "{W}[{W} > 1.0] = 1.0",
    "{W} -= {W}.mean(-1, keepdim=True)", "{W}[:, 1] = {f}", "F.relu({W}, inplace=True)",
    "self.kept = {w}", "self.kept = {w}.clone()", "self.kept = edge_attr.clone()",
    "{W} = {w}.clone()",
    "self.kept_too = edge_attr", "{W} = {w}.clone()\n{W} += 1", "self.kept = {w}.detach()",
    "self.kept = {w}[:, :2]", "self.kept = {n}",
    "self.kept_too = {f}", "self.kept = {w}\n{W} = self.kept * 2", "self.kept = {h}",
    "with torch.no_grad():\n    self.kept_too = {w}.sum(-1)", "self.kept_too = ({w}, {n})",
    "with torch.no_grad():\n    {W} = {w} * 0.5", "{W} = {w}.detach()",
    "if edge_attr is not None:\n    {W} = {W} + self.edge_lin(edge_attr)",
    "if edge_weight is not None:\n    {W} = {W} * edge_weight.view(-1, 1)",
    "if self.training:\n    {W} = {W} * 0.9", "if self.on:\n    {W} = {w} * 1.5",
    "if self.opts.get('power', 1.0) > 1.5:\n    {W} = {w} ** 2",
    "a, b = {w}.chunk(2, dim=-1)\n{W} = torch.cat([a * b, b.tanh()], -1)",
    "a, b = {w}.split([{D}, {D}], dim=-1)\n{W} = torch.cat([F.relu(b), a], -1)",
    "a, b, *_ = torch.unbind({w}, -1)\n{W} = {w} * (a - b).unsqueeze(-1)",
    "f = {f} - scatter({f}, index, 0, size_i, 'max')[index]\nf = f.exp()\n"
    "f = f / (scatter(f, index, 0, size_i, 'sum')[index] + 1e-16)\n{W} = f.view(-1, 1) * {w}",
    "t = scatter({w}, index, 0, size_i, 'mean')\n{W} = {w} - t[index]",
    "for lin in self.heads:\n    {W} = {W} + torch.cat([lin({w})] * 2, -1)",
    "for k, r in enumerate(self.rates):\n    {W} = {W} + r * {w} ** (k + 1)",
    "y = {w}\n{W} = y * 2\ny = y + 1\n{W} = {W} + y",
)
#: scores and values of attention, of rows that come as heads; whole messages
SCORES = ("(x_i * self.att2).sum(-1) + (x_j * self.att3).sum(-1)",
          "(x_i * x_j).sum(dim=-1) / {D} ** 0.5",
          "(torch.cat([x_i, x_j], dim=-1) * self.ends).sum(dim=-1)", "(x_j * self.att2).sum(-1)",
          "(F.leaky_relu(x_i + x_j, self.opts['slope']) * self.att2).sum(-1)",
          "(x_j * self.att3).sum(-1) + self.edge_att(edge_attr)",
          "(x_i * (x_j + self.edge_lin(edge_attr).view(-1, 2, {D}))).sum(-1)")
AFTER_SCORES = ("alpha = F.leaky_relu(alpha, self.opts['slope'])", "alpha = self.act(alpha)",
                "self.kept = alpha", "alpha = alpha * self.eps", "alpha = F.relu(alpha)")
AFTER_WEIGHTS = ("alpha = F.dropout(alpha, p=self.drop, training=self.training)",
                 "self.kept = alpha",
                 "self.kept = alpha.detach()", "alpha = alpha * edge_weight.view(-1, 1)")
VALUES_OF_HEADS = ("x_j * alpha.unsqueeze(-1)", "alpha.unsqueeze(-1) * x_j",
                   "alpha[..., None] * (x_j * self.eps)",
                   "x_j * alpha.view(-1, 2, 1)", "alpha.unsqueeze(-1) * (x_j - x_i)",
                   "(x_j + self.edge_lin(edge_attr).view(-1, 2, {D})) * alpha.unsqueeze(-1)")
MESSAGES = ("x_j", "edge_weight.view(-1, 1) * x_j", "norm.view(-1, 1) * x_j",
            "x_j * edge_weight.unsqueeze(-1)",
            "F.relu(x_j + self.edge_lin(edge_attr))",
            "self.mlp(torch.cat([x_i, x_j - x_i], dim=-1))",
            "softmax(self.to_one(torch.cat([x_i, x_j], -1)), index, ptr, size_i) * x_j",
            "x_j - x_i",
            "x_j if edge_weight is None else x_j * edge_weight.view(-1, 1)", "self.lin2(x_j)",
            "softmax(self.act(self.last(x_j * x_i)).view(-1), index)[:, None] * self.lin2(x_j)")
VALUES = {"wide": WIDE, "narrow": NARROW, "flat": FLAT, "heads": HEADS}
SHARES = (("wide", 0.5), ("narrow", 0.15), ("flat", 0.1), ("heads", 0.1))
ARGUMENTS = ("x_i", "x_j", "h_i", "h_j", "pos_i", "pos_j", "edge_attr", "edge_weight", "norm",
             "kind",
             "index", "ptr", "size_i", "factor")
#: of features that a call may leave out; these stand in statements that ask for them only
OPTIONAL = ("edge_attr", "edge_weight")


class Writer:
    """The statements of one function. ``headed``: rows come as heads. ``without``: the numbers of
    those that are left out."""

    def __init__(self, d: Draw, channels: int, headed: bool = False, optional: bool = False,
                 without: frozenset = frozenset()):
        self.d, self.without, self.optional, self.headed = d, without, optional, headed
        self.sizes = {"C": str(channels), "D": str(channels // 2)}
        rows = "x_j.reshape(-1, {C})" if headed else "x_j"
        heads = "x_j" if headed else "x_j.view(-1, 2, {D})"
        self.base = {"wide": rows, "narrow": f"{rows}[:, :1]", "flat": f"{rows}[:, 0]",
                     "heads": heads}
        ends = ("x_i.reshape(-1, {C})",) if headed else ("x_i",)
        self.known: dict[str, list[str]] = {kind: [one] for kind, one in self.base.items()}
        self.known["wide"] += ends
        self.lines: list[str] = []

    def statements(self, count: int) -> tuple[str, str]:
        """So many of them; the name of what the last gave, and its kind."""
        last = self.base["wide"], "wide"
        for number in range(count):
            last = self._statement(number)
        return last

    def known_form(self) -> list[str]:
        """The lines of a message as those of published layers."""
        d = self.d
        if not self.headed:
            return [f"return {self._filled(self._allowed(MESSAGES))}"]
        lines = [f"alpha = {self._filled(self._allowed(SCORES))}"]
        lines += [d.choice(AFTER_SCORES) for _ in range(d.choice((0, 1, 1, 2)))]
        lines.append(f"alpha = softmax(alpha, {d.choice(('index', 'index, ptr, size_i'))})")
        lines += [self._allowed(AFTER_WEIGHTS) for _ in range(d.choice((0, 1, 2)))]
        return [*lines, f"return {self._filled(self._allowed(VALUES_OF_HEADS))}"]

    def together(self, last: tuple[str, str], kind: str) -> str:
        """A value as rows of a kind, at times with other values, so that these count as well."""
        found = self.as_kind(*last, kind)
        for _ in range(self.d.choice((0, 1, 2))):
            of = self.d.choice(list(self.known))
            other = self.as_kind(self.d.choice(self.known[of]), of, kind)
            found = self.d.choice(("{} + {}", "{} - 0.5 * ({})", "{} * torch.sigmoid({})")).format(
                found if found.isidentifier() else f"({found})", other)
        return found

    def as_kind(self, value: str, of: str, kind: str) -> str:
        """What a value is as the rows that a message returns, or a number for each edge."""
        ways = {
            "wide": {"wide": "{}", "narrow": "{} * {w}", "flat": "{}.unsqueeze(-1) * {w}",
                     "heads": "{}.reshape(-1, {C})"},
            "heads": {"wide": "{}.view(-1, 2, {D})", "narrow": "{}.unsqueeze(1) * {h}",
                      "flat": "{}.view(-1, 1, 1) * {h}", "heads": "{}"},
            "narrow": {"wide": "{}.mean(-1, keepdim=True)", "narrow": "{}",
                       "flat": "{}.unsqueeze(-1)", "heads": "{}.sum(-1).sum(-1, keepdim=True)"},
        }
        return self._filled(ways[kind][of].replace("{}", value))

    def _statement(self, number: int) -> tuple[str, str]:
        d, draw = self.d, self.d.random()
        for kind, share in SHARES:
            draw -= share
            if draw < 0:
                text = self._filled(self._allowed(VALUES[kind]))
                old = [name for name in self.known[kind] if name[1:].isdigit()]
                name = d.choice(old) if old and d.chance(0.3) else f"{kind[0]}{number}"
                left_out = number in self.without
                self.lines.append(f"{name} = {self._filled(self.base[kind]) if left_out else text}")
                if name not in self.known[kind]:
                    self.known[kind].append(name)
                return name, kind
        text, name = self._allowed(OTHERS), self._local()
        text = self._filled(text.replace("{W}", name))
        if number not in self.without:
            self.lines += text.split("\n")
        return name, "wide"

    def _local(self) -> str:
        """A name of rows that a statement may write to."""
        names = [name for name in self.known["wide"] if "." not in name]
        return self.d.choice(names[-3:]) if names else self._new()

    def _new(self) -> str:
        self.lines.append(f"w99 = {self._filled(self.base['wide'])}")
        self.known["wide"].append("w99")
        return "w99"

    def _allowed(self, texts: tuple[str, ...]) -> str:
        never = OPTIONAL if self.optional else ()
        never += ("x_i", "x_j") if self.headed and texts in (*VALUES.values(), OTHERS) else ()
        found = self.d.choice(texts)
        while "None" not in found and any(name in found for name in never):
            found = self.d.choice(texts)
        return found

    def _filled(self, text: str) -> str:
        kinds = {"w": "wide", "n": "narrow", "f": "flat", "h": "heads"}

        def put(match: re.Match) -> str:
            key = match[1]
            if key in self.sizes:
                return self.sizes[key]
            names = self.known[kinds[key]]
            name = self.d.choice(names[-2:] if self.d.chance(0.6) else names)
            return self._filled(name)

        return re.sub(r"\{([wnfhCD])\}", put, text)


def used(text: str, *names: str) -> list[str]:
    """Those of the names that stand in a text."""
    return [name for name in names or ARGUMENTS if re.search(rf"\b{name}\b", text)]
