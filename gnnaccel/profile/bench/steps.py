"""What is timed of a layer: one forward, or one forward and backward."""
from __future__ import annotations

import torch

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.profile.bench.shapes import Graph

MODES = ("forward", "training")


class Step:
    """A module on one graph. Call it for one step; ``clear`` drops what the step left (gradients).

    forward: evaluation mode under ``torch.no_grad()``. training: forward, then backward from a
    fixed random gradient into the input and the weights, gradients set to None before. No loss and
    no optimizer: their cost is the same for everybody and would only hide differences.
    """

    def __init__(self, module: torch.nn.Module, graph: Graph, mode: str, out_channels: int,
                 seed: int = 1, in_channels: int = pyg.IN_CHANNELS) -> None:
        generator = torch.Generator(graph.device).manual_seed(seed)
        self.module, self.edge_index, self.training = module, graph.edge_index, mode == "training"
        self.x = torch.randn(graph.num_nodes, in_channels, device=graph.device, generator=generator)
        self.x.requires_grad_(self.training)
        self.grad = torch.randn(graph.num_nodes, out_channels, device=graph.device,
                                generator=generator)
        self.device = graph.device
        module.train(self.training)

    def __call__(self) -> torch.Tensor:
        if not self.training:
            with torch.no_grad():
                return self.module(self.x, self.edge_index)
        self.clear()
        out = self.module(self.x, self.edge_index)
        out.backward(self.grad)
        return out.detach()

    def clear(self) -> None:
        self.x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None

    def results(self) -> dict[str, torch.Tensor]:
        """Run one step and return its output and, in training, the input's gradient."""
        found = {"output": self()}
        if self.training and self.x.grad is not None:
            found["x.grad"] = self.x.grad
        self.clear()
        return found


def layer_step(spec: pyg.LayerSpec, graph: Graph, mode: str) -> Step:
    """The step of one attention layer; equal arguments give equal weights and inputs."""
    return Step(pyg.build_layer(spec, graph.device), graph, mode, spec.out_channels)


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest absolute and relative L2 difference of each tensor present in both, as "name
    max_abs"/"name rel_l2"."""
    values = {}
    for name in ours.keys() & theirs.keys():
        # float64 would double the memory of what may be the largest tensors of the run; the norm is
        # enough.
        gap = ours[name] - theirs[name]
        norm = float(torch.linalg.vector_norm(theirs[name], dtype=torch.float64))
        values[f"{name} max_abs"] = float(gap.abs().max())
        distance = float(torch.linalg.vector_norm(gap, dtype=torch.float64))
        values[f"{name} rel_l2"] = distance / max(norm, 1e-30)
    return values
