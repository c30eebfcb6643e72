"""What is timed of a layer, with relations or without: one forward, or one forward and backward."""
from __future__ import annotations

import torch

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.adapters.pyg.bench import relational
from gnnaccel.profile.bench.relation_graph import RelationGraph
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


class RelationStep:
    """A module with its arguments, of any host. Call it for one step; ``clear`` drops what the step
    left (gradients).

    Modes are those of `Step`. Input and output may be a tensor each or a dictionary of them.
    """

    def __init__(self, module: torch.nn.Module, inputs: dict[str, torch.Tensor], arguments: tuple,
                 mode: str, keywords: dict | None = None) -> None:
        self.module, self.inputs, self.training = module, inputs, mode == "training"
        self.arguments, self.keywords = arguments, keywords or {}
        for tensor in inputs.values():
            tensor.requires_grad_(self.training)
        self.device = next(iter(inputs.values())).device
        self._grads: list[torch.Tensor] = []
        module.train(self.training)

    def __call__(self) -> list[torch.Tensor]:
        if not self.training:
            with torch.no_grad():
                return _tensors(self.module(*self.arguments, **self.keywords))
        self.clear()
        out = _tensors(self.module(*self.arguments, **self.keywords))
        if not self._grads:
            generator = torch.Generator(self.device).manual_seed(2)
            self._grads = [torch.randn(part.shape, device=self.device, generator=generator)
                           for part in out]
        torch.autograd.backward(out, self._grads)
        return [part.detach() for part in out]

    def clear(self) -> None:
        for tensor in self._leaves():
            tensor.grad = None

    def results(self) -> dict[str, torch.Tensor]:
        """Run one step and return its output and, in training, the gradients of the inputs and of
        the weights.

        Each as one flat tensor; what got no gradient counts as zeros.
        """
        found = {"output": _flat(self())}
        if self.training:
            found["x.grad"] = _flat(_grad(tensor) for tensor in self.inputs.values())
            found["weights.grad"] = _flat(_grad(tensor) for tensor in self.module.parameters())
        self.clear()
        return found

    def _leaves(self) -> list[torch.Tensor]:
        return [*self.inputs.values(), *self.module.parameters()]


def relation_step(layer: relational.RelationLayer, graph: RelationGraph,
                  mode: str) -> RelationStep:
    """The step of one layer on one graph; equal arguments give equal weights and inputs."""
    generator = torch.Generator(graph.device).manual_seed(1)
    counts = graph.node_counts if layer.typed else {"x": graph.num_nodes}
    inputs = {name: torch.randn(count, pyg.IN_CHANNELS, device=graph.device, generator=generator)
              for name, count in counts.items()}
    triples = list(graph.typed) if layer.typed else []
    module = relational.build_layer(layer, graph.num_relations, list(counts), triples, graph.device)
    arguments = ((inputs, graph.typed) if layer.typed
                 else (inputs["x"], graph.edge_index, graph.edge_type))
    return RelationStep(module, inputs, arguments, mode)


def _tensors(out) -> list[torch.Tensor]:
    """The output's tensors, by name where they have names: hosts may fill a dictionary in any
    order."""
    if isinstance(out, torch.Tensor):
        return [out]
    return [out[name] for name in sorted(out) if out[name] is not None]


def _flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


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
