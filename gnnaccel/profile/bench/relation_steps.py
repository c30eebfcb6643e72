"""What is timed of a relational layer: one forward, or one forward and backward."""
from __future__ import annotations

import torch

from gnnaccel.adapters.pyg.bench import relational as pyg
from gnnaccel.profile.bench.relation_graph import RelationGraph


class RelationStep:
    """A module with its arguments, of any host. Call it for one step; ``clear`` drops what the step
    left (gradients).

    Modes are those of `steps.Step`. Input and output may be a tensor each or a dictionary of them.
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


def relation_step(layer: pyg.RelationLayer, graph: RelationGraph, mode: str,
                  seed: int = 1) -> RelationStep:
    """The step of one layer on one graph; equal arguments give equal weights and inputs."""
    generator = torch.Generator(graph.device).manual_seed(seed)
    counts = graph.node_counts if layer.typed else {"x": graph.num_nodes}
    inputs = {name: torch.randn(count, pyg.IN_CHANNELS, device=graph.device, generator=generator)
              for name, count in counts.items()}
    triples = list(graph.typed) if layer.typed else []
    module = pyg.build_layer(layer, graph.num_relations, list(counts), triples, graph.device)
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
