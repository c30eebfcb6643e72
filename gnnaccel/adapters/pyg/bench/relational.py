"""PyG's relational layers for the benchmark, and models of such: built, and fitted with their
inputs."""
from __future__ import annotations

import dataclasses

from gnnaccel.adapters.pyg.bench.layers import IN_CHANNELS, LayerSpec, named
from gnnaccel.adapters.pyg.bench.models import two_layers


@dataclasses.dataclass(frozen=True)
class RelationLayer(LayerSpec):
    """A relational layer, or a model that the function ``class_name`` makes of two: ``heads`` heads
    of ``width`` features each.

    ``typed`` layers take dictionaries by node type and (source type, relation, destination type);
    the others take all nodes in one tensor, ``edge_index`` and ``edge_type``.
    """

    typed: bool = False


LAYERS = {layer.name: layer for layer in (
    RelationLayer("RGCN 64", "RGCNConv", 1, 64),
    RelationLayer("FastRGCN 64", "FastRGCNConv", 1, 64),
    RelationLayer("RGAT 64", "RGATConv", 1, 64),
    RelationLayer("HGT 4x16", "HGTConv", 4, 16, typed=True),
    RelationLayer("HeteroSAGE 64", "HeteroConv", 1, 64, typed=True),
    RelationLayer("to_hetero SAGE 64", "to_hetero", 1, 64, typed=True),
    RelationLayer("to_hetero_with_bases SAGE 64", "to_hetero_with_bases", 1, 64, typed=True),
)}

MODELS = ("to_hetero", "to_hetero_with_bases")
BASES = 4


def resolve(name: str) -> RelationLayer:
    """The layer called ``name``, see `named`."""
    return named(name, LAYERS)


def build_layer(layer: RelationLayer, num_relations: int, node_types: list[str],
                triples: list[tuple[str, str, str]], device):
    """The layer with its host's defaults and the same weights each time.

    ``node_types`` and ``triples`` are the metadata of typed layers, ``num_relations`` that of the
    others.
    """
    import torch
    import torch_geometric.nn

    torch.manual_seed(0)
    if layer.class_name == "HeteroConv":
        built = _hetero_sage(layer, triples)
    elif layer.class_name in MODELS:
        built = _model(layer, node_types, triples)
    elif layer.class_name == "HGTConv":
        built = torch_geometric.nn.HGTConv(IN_CHANNELS, layer.out_channels, (node_types, triples),
                                           heads=layer.heads)
    else:
        options = {"heads": layer.heads} if layer.class_name == "RGATConv" else {}
        built = getattr(torch_geometric.nn,
                        layer.class_name)(IN_CHANNELS, layer.width, num_relations, **options)
    return built.to(device)


def _hetero_sage(layer: RelationLayer, triples: list[tuple[str, str, str]]):
    from torch_geometric.nn import HeteroConv, SAGEConv

    return HeteroConv({triple: SAGEConv((IN_CHANNELS, IN_CHANNELS), layer.width)
                       for triple in triples})


def _model(layer: RelationLayer, node_types: list[str], triples: list[tuple[str, str, str]]):
    """Two layers of SAGEConv, made into a model over types."""
    import torch_geometric.nn
    from torch_geometric.nn import SAGEConv

    net = two_layers(SAGEConv(IN_CHANNELS, layer.width), SAGEConv(layer.width, layer.width),
                     lambda x: x.relu())
    bases = (BASES,) if layer.class_name == "to_hetero_with_bases" else ()
    return getattr(torch_geometric.nn, layer.class_name)(net, (node_types, triples), *bases)
