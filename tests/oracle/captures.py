"""Histories inside of CUDA graphs: buffers are refilled, and each replay is held against the host.

A capture that raises counts as refused. It leaves the process unfit for more, so a new one takes
over.
"""

from __future__ import annotations

import copy
import random

import torch
from torch import Tensor, nn

from .backends import Backend, off
from .judge import beyond, differing, distances
from .models import IN, MODELS
from .table import attempt
from .trees import named, tree_map

FLOOR = 1e-4
REFILLS = 5


def applicable(backend: Backend) -> bool:
    return backend.name == "gpu"


class Capture:
    """A layer, its static buffers, and the graph captured over them."""

    def __init__(self, seed: int, backend: Backend, name: str):
        self.choose = random.Random(f"capture {seed}")
        torch.manual_seed(seed)
        self.backend, self.device = backend, backend.device
        choices = sorted(n for n, (_, edge) in MODELS.items() if edge in ("", "weight", "attr"))
        self.name = name or self.choose.choice(choices)
        make, self.edge = MODELS[self.name]
        self.train = self.choose.random() < 0.4
        self.nodes, self.edges = self.choose.choice(((20, 80), (200, 3000), (4000, 30000)))
        self.model = self._without_loops(make()).to(self.device).requires_grad_(self.train).eval()
        self.x = torch.randn(self.nodes, IN, device=self.device)
        self.edge_index = torch.randint(0, self.nodes, (2, self.edges), device=self.device)
        self._without_repeated_loops()
        shape = {"weight": (self.edges,), "attr": (self.edges, 3)}.get(self.edge)
        self.values = None if shape is None else torch.rand(shape, device=self.device) + 0.1
        self.graph, self.captured = torch.cuda.CUDAGraph(), {}

    def _without_loops(self, model: nn.Module) -> nn.Module:
        """Natively, layers that add loops cannot be captured: how many they add depends on data."""
        if self.choose.random() < 0.7:
            for module in model.modules():
                if getattr(module, "add_self_loops", None) is True:
                    module.add_self_loops = False
        return model

    def _without_repeated_loops(self) -> None:
        """Of the weights of a node's loops the host takes any where there are several."""
        if self.edge == "weight":
            src, dst = self.edge_index
            src.copy_(torch.where(src == dst, (src + 1) % self.nodes, src))
            self.edge_index[:, 0] = 4

    def call(
        self, model: nn.Module, x: Tensor, edge_index: Tensor, values: Tensor | None
    ) -> dict[str, Tensor | None]:
        args = (x, edge_index) if values is None else (x, edge_index, values)
        outs = named(model(*args))
        if not self.train:
            return outs
        wrt = {k: p for k, p in model.named_parameters() if p.requires_grad}
        loss = sum(t.pow(2).sum() for t in outs.values())
        return {
            **outs,
            **dict(zip(wrt, torch.autograd.grad(loss, list(wrt.values()), allow_unused=True))),
        }

    def capture(self) -> None:
        """Warm up on a side stream, as torch's documentation asks, and capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.set_grad_enabled(self.train):
            for _ in range(self.choose.choice((1, 3))):
                self.call(self.model, self.x, self.edge_index, self.values)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph), torch.set_grad_enabled(self.train):
            self.captured = self.call(self.model, self.x, self.edge_index, self.values)

    def refill(self) -> str:
        """Change what the graph reads, in place."""

        def edges() -> None:
            self.edge_index.copy_(torch.randint(0, self.nodes, (2, self.edges), device=self.device))
            self._without_repeated_loops()

        def one_target() -> None:
            self.edge_index[1].fill_(self.choose.randrange(self.nodes))
            self._without_repeated_loops()

        def weights() -> None:
            for p in self.model.parameters():
                p.mul_(0.9).add_(0.05)

        ways = {
            "x": lambda: self.x.mul_(1.5).add_(0.1),
            "edges": edges,
            "weights": weights,
            "nothing": lambda: None,
            "one target": one_target,
        }
        if self.values is not None:
            ways["values"] = lambda: self.values.mul_(0.5).add_(0.2)
        way = self.choose.choice(sorted(ways))
        with torch.no_grad():
            ways[way]()
        return way

    def _natively(
        self, edge_index: Tensor, values: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor | None]:
        """The host's results by a copy of the model in ``dtype``."""
        model = copy.deepcopy(self.model).to(dtype)
        values = None if values is None else values.to(dtype)
        with off(), torch.set_grad_enabled(self.train):
            results = self.call(model, self.x.to(dtype), edge_index, values)
        return tree_map(lambda t: t.detach(), results)

    def compare(self) -> str | None:
        """The results of a replay against the host's over copies, which no memory can know."""
        self.graph.replay()
        torch.cuda.synchronize()
        got = {k: None if t is None else t.detach().clone() for k, t in self.captured.items()}
        fresh = self.edge_index.clone(), None if self.values is None else self.values.clone()
        host = self._natively(*fresh)
        found = differing(got, host)
        if found is None and max(distances(got, host).values(), default=0.0) > FLOOR:
            truth = self._natively(*fresh, torch.float64)
            found = beyond([(got, host, truth)], FLOOR)
        return found and found.text


def check(seed: int, backend: Backend, name: str = "") -> tuple[str, str | None, int]:
    """What was captured, what is wrong, and how many replays were compared."""
    case = Capture(seed, backend, name)
    with backend.on():
        _, refused = attempt(case.capture)
    if refused:
        return case.name, "start again", 0
    found, log, checks = case.compare(), [], 1
    for _ in range(REFILLS):
        if found:
            break
        log.append(case.refill())
        found, checks = case.compare(), checks + 1
    what = f"{'training' if case.train else 'forward'} over {case.nodes} nodes, {case.edges} edges"
    return (case.name, found and f"{found} | {what}, after refilling {', '.join(log) or 'nothing'}",
            checks)
