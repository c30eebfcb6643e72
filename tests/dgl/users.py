"""Layers with message and reduce functions of their own, as users write them."""
from __future__ import annotations

import math

import dgl.function as fn
import torch
import torch.nn.functional as F
from torch import nn

from tests.dgl.graphs import E, F as WIDTH, N

HALF = 0.5


class Layer(nn.Module):
    """``forward(graph, feat, third, fourth)``: features of sources, of destinations and of edges.
    ``EDGE``: the shape of the latter's rows."""

    EDGE: tuple[int, ...] = (1,)

    def forward(self, graph, feat, third=None, fourth=None):
        with graph.local_scope():
            graph.srcdata["h"] = feat
            graph.dstdata["k"] = third
            graph.edata["w"] = fourth
            return self.passed(graph)


class Weighted(Layer):
    def passed(self, graph):
        graph.update_all(lambda edges: {"m": edges.src["h"] * edges.data["w"]}, fn.sum("m", "y"))
        return graph.dstdata["y"]


class Turned(Layer):
    """Operands the other way round; a mean."""

    EDGE = (WIDTH,)

    def passed(self, graph):
        graph.update_all(lambda edges: {"m": edges.data["w"] - edges.src["h"]}, fn.mean("m", "y"))
        return graph.dstdata["y"]


class BothEnds(Layer):
    """A method, numbers of the module and of the object, a parameter, a gate."""

    EDGE = (WIDTH,)

    def __init__(self):
        super().__init__()
        self.scale, self.bias = 0.3, nn.Parameter(torch.randn(WIDTH))

    def message(self, edges):
        gate = torch.sigmoid(edges.src["h"] * self.scale + edges.dst["k"] + self.bias)
        return {"m": HALF * gate * F.relu(edges.data["w"] - edges.dst["k"])}

    def passed(self, graph):
        graph.update_all(self.message, fn.mean("m", "y"))
        return graph.dstdata["y"]


class Maps(Layer):
    """Linear maps of both ends and the edge side by side, and of the message."""

    EDGE = (3,)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2 * WIDTH + 3, 8), nn.Linear(8, 5)
        self.act = nn.LeakyReLU(0.1)

    def passed(self, graph):
        graph.update_all(
            lambda edges: {"m": self.second(self.act(self.first(torch.cat(
                [edges.src["h"], edges.dst["k"], edges.data["w"]], dim=1))))}, fn.sum("m", "y"))
        return graph.dstdata["y"]


class Closed(Layer):
    """A variable of the call, and a module beside ``self``."""

    def passed(self, graph):
        row, power = graph.srcdata["h"].mean(0), 1.5
        graph.update_all(lambda edges: {"m": torch.tanh(edges.src["h"] * row) / power},
                         fn.sum("m", "y"))
        return graph.dstdata["y"]


class Scalars(Layer):
    """Messages without a dimension of features."""

    EDGE = ()

    def passed(self, graph):
        graph.srcdata["a"], graph.dstdata["b"] = graph.srcdata["h"][:, 0], graph.dstdata["k"][:, 0]
        graph.update_all(lambda edges: {"m": torch.exp(edges.src["a"] - edges.dst["b"])
                                        * edges.data["w"]}, fn.sum("m", "y"))
        return graph.dstdata["y"]


class Heads(Layer):
    """Features of heads, each with a number at the edge."""

    EDGE = (3, 1)

    def passed(self, graph):
        graph.srcdata["q"] = graph.srcdata["h"].view(-1, 3, WIDTH // 3)
        graph.update_all(lambda edges: {"m": F.relu(edges.src["q"]) * edges.data["w"]},
                         fn.sum("m", "y"))
        return graph.dstdata["y"]


#: messages, with DGL's own reductions
MESSAGES = (Weighted, Turned, BothEnds, Maps, Closed, Scalars, Heads)


class Mailbox(Layer):
    """``reduce``: of the messages "m"."""

    def message(self, edges):
        return {"m": F.elu(edges.src["h"]) * edges.data["w"]}

    def passed(self, graph):
        graph.update_all(self.message, self.reduce)
        return graph.dstdata["y"]


class Summed(Mailbox):
    def reduce(self, nodes):
        return {"y": nodes.mailbox["m"].sum(1)}


class Averaged(Mailbox):
    def reduce(self, nodes):
        return {"y": torch.mean(nodes.mailbox["m"], dim=1)}


class Beside(Mailbox):
    """With features of the node, and a map of both."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(2 * WIDTH, 4)

    def reduce(self, nodes):
        total = torch.sum(nodes.mailbox["m"] * 2.0, dim=1)
        return {"y": F.relu(self.map(torch.cat([nodes.data["k"], total], 1))) / total.norm(
            dim=1, keepdim=True)}


class Copied(Mailbox):
    """One of DGL's own messages."""

    def passed(self, graph):
        graph.update_all(fn.u_mul_e("h", "w", "m"), lambda nodes: {"y": nodes.mailbox["m"].sum(1)})
        return graph.dstdata["y"]


class Largest(Mailbox):
    def reduce(self, nodes):
        return {"y": nodes.mailbox["m"].max(1)[0]}


class Smallest(Mailbox):
    def reduce(self, nodes):
        return {"y": torch.min(nodes.mailbox["m"], dim=1).values}


class Tutorial(Layer):
    """GAT as DGL's tutorial writes it."""

    def __init__(self, wide: bool = False):
        super().__init__()
        self.fc, self.attn_fc = nn.Linear(WIDTH, 6, bias=False), nn.Linear(12, 1, bias=False)

    def edge_attention(self, edges):
        z2 = torch.cat([edges.src["z"], edges.dst["z"]], dim=1)
        return {"e": F.leaky_relu(self.attn_fc(z2))}

    def message_func(self, edges):
        return {"z": edges.src["z"], "e": edges.data["e"]}

    def reduce_func(self, nodes):
        alpha = F.softmax(nodes.mailbox["e"], dim=1)
        return {"y": torch.sum(alpha * nodes.mailbox["z"], dim=1)}

    def passed(self, graph):
        graph.srcdata["z"] = self.fc(graph.srcdata["h"])
        graph.dstdata["z"] = self.fc(graph.dstdata["k"])
        graph.apply_edges(self.edge_attention)
        graph.update_all(self.message_func, self.reduce_func)
        return graph.dstdata["y"]


class Attention(Layer):
    """Scores in the message, of heads, scaled; the softmax in the mailbox."""

    EDGE = (3,)

    def passed(self, graph):
        graph.srcdata["q"] = graph.srcdata["h"].view(-1, 3, WIDTH // 3)
        graph.dstdata["s"] = graph.dstdata["k"][:, :3]

        def message(edges):
            return {"s": torch.tanh(edges.dst["s"] + edges.data["w"]), "q": edges.src["q"]}

        def reduce(nodes):
            alpha = torch.softmax(nodes.mailbox["s"] / math.sqrt(2.0), 1)
            return {"y": (alpha.unsqueeze(-1) * nodes.mailbox["q"]).sum(1)}

        graph.update_all(message, reduce)
        return graph.dstdata["y"]


class Products(Layer):
    """Inner products of maps of both ends, as scores."""

    EDGE = (3, 2)

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)
        self.scale = nn.Parameter(torch.randn(3))

    def passed(self, graph):
        graph.srcdata["q"] = self.q(graph.srcdata["h"]).view(-1, 3, 2)
        graph.dstdata["q"] = self.k(graph.dstdata["k"]).view(-1, 3, 2)
        graph.apply_edges(lambda edges: {"s": (edges.src["q"] * edges.dst["q"]).sum(-1)})

        def reduce(nodes):
            alpha = nodes.mailbox["s"].softmax(dim=1).unsqueeze(-1)
            return {"y": (alpha * nodes.mailbox["v"]).sum(dim=1)}

        graph.update_all(lambda edges: {"s": edges.data["s"] * self.scale,
                                        "v": edges.src["q"] + edges.data["w"]}, reduce)
        return graph.dstdata["y"]


class ScoresOfMaps(Layer):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)

    def passed(self, graph):
        graph.apply_edges(lambda edges: {"s": torch.sum(
            self.q(edges.src["h"]) * self.k(edges.dst["k"]), dim=1, keepdim=True) + edges.data["w"]})
        return graph.edata["s"]


class Predictor(Layer):
    """A network of both ends, whose score has no dimension."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2 * WIDTH, 8), nn.Linear(8, 1)

    def apply_edges(self, edges):
        h = torch.cat([edges.src["h"], edges.dst["k"]], 1)
        return {"s": self.second(F.relu(self.first(h))).squeeze(1)}

    def passed(self, graph):
        graph.apply_edges(self.apply_edges)
        return graph.edata["s"]


class Distances(Layer):
    """Norms and sums over channels of both ends."""

    EDGE = (WIDTH,)

    def passed(self, graph):
        graph.apply_edges(lambda edges: {
            "s": torch.norm(edges.src["h"] - edges.dst["k"], dim=-1, p=2),
            "t": (F.leaky_relu(edges.src["h"] + edges.dst["k"]) * edges.data["w"]).mean(
                -1, keepdim=True)})
        return graph.edata["s"], graph.edata["t"]


class Thresholds(Layer):
    """What is compared, and used beside, is made once with and once without gradients."""

    def passed(self, graph):
        def message(edges):
            score = (edges.src["h"] * edges.dst["k"]).sum(-1, keepdim=True) / WIDTH
            return {"m": torch.where(score > 0, score.exp(), score * edges.data["w"]),
                    "h": edges.src["h"]}

        def reduce(nodes):
            alpha = F.softmax(nodes.mailbox["m"], dim=1)
            kept = torch.where(alpha > 0.1, alpha ** 2, alpha)
            return {"y": (kept * nodes.mailbox["h"]).sum(1)}

        graph.update_all(message, reduce)
        return graph.dstdata["y"]


class GatedGCN(Layer):
    """As benchmarks write it: the message function writes features of edges."""

    EDGE = (WIDTH,)

    def message_func(self, edges):
        e_ij = edges.data["w"] + edges.src["h"] + edges.dst["k"]
        edges.data["e"] = e_ij
        return {"h_j": edges.src["h"], "e_ij": e_ij}

    def reduce_func(self, nodes):
        sigma_ij = torch.sigmoid(nodes.mailbox["e_ij"])
        total = torch.sum(sigma_ij * nodes.mailbox["h_j"], dim=1)
        return {"y": nodes.data["k"] + total / (torch.sum(sigma_ij, dim=1) + 1e-6)}

    def passed(self, graph):
        graph.update_all(self.message_func, self.reduce_func)
        return graph.dstdata["y"], graph.edata["e"]


class WritesAndReads(Layer):
    def passed(self, graph):
        def message(edges):
            edges.data["w"] = F.relu(edges.src["h"] * edges.data["w"])
            return {"m": edges.data["w"] * edges.dst["k"]}

        graph.apply_edges(message)
        graph.update_all(message, fn.sum("m", "y"))
        return graph.dstdata["y"], graph.edata["w"], graph.edata["m"]


class ScoredInMailbox(Layer):
    """Scores of the mailbox and of features of the node."""

    def passed(self, graph):
        graph.dstdata["q"] = graph.dstdata["k"].view(-1, 3, WIDTH // 3)
        graph.srcdata["q"] = graph.srcdata["h"].view(-1, 3, WIDTH // 3)

        def reduce(nodes):
            keys = nodes.mailbox["k"]
            score = (nodes.data["q"].unsqueeze(1) * keys).sum(-1, keepdim=True) / 2.0
            bent = (torch.tanh(nodes.data["q"].unsqueeze(1) + keys)).mean(3, keepdim=True)
            return {"y": (F.softmax(score, 1) * torch.sigmoid(bent) * keys).sum(1)}

        graph.update_all(fn.copy_u("q", "k"), reduce)
        return graph.dstdata["y"]


class Scored(Layer):
    """GATv2 as users write it: the score is made of both ends in the message."""

    def __init__(self):
        super().__init__()
        self.attn, self.out = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 4)

    def passed(self, graph):
        def reduce(nodes):
            alpha = torch.softmax(nodes.mailbox["e"], dim=1)
            return {"y": (alpha * self.out(nodes.mailbox["z"])).sum(1)}

        graph.update_all(lambda edges: {"e": self.attn(F.leaky_relu(edges.src["h"]
                                                                    + edges.dst["k"])),
                                        "z": edges.src["h"] * edges.data["w"]}, reduce)
        return graph.dstdata["y"]


SUMS = (Summed, Averaged, Beside, Copied, GatedGCN)
EXTREMA = (Largest, Smallest)
ATTENTION = (Attention, Products, Scored, ScoredInMailbox, Thresholds)


def arguments(layer: type[Layer], graph=None) -> tuple:
    """Features for a graph like `graphs.square`."""
    src, dst, edges = (N, N, E) if graph is None else (graph.num_src_nodes(), graph.num_dst_nodes(),
                                                       graph.num_edges())
    return torch.randn(src, WIDTH), torch.randn(dst, WIDTH), torch.randn(edges, *layer.EDGE)
