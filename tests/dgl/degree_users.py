"""Layers whose reduce functions read how many edges a node has, as users write them."""
from __future__ import annotations

import math

import dgl.function as fn
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.dgl.users import WIDTH, Layer

EPS = 1e-5


def mean(h):
    return torch.mean(h, dim=-2)


def largest(h):
    return torch.max(h, dim=1)[0]


def least(h):
    return torch.min(h, dim=1)[0]


def variance(h):
    squares = torch.mean(h * h, dim=-2)
    mean_ = torch.mean(h, dim=-2)
    return torch.relu(squares - mean_ * mean_)


def deviation(h):
    return torch.sqrt(variance(h) + EPS)


def identity(h, D=None, avg_d=None):
    return h


def amplified(h, D, avg_d):
    return h * (np.log(D + 1) / avg_d["log"])


def attenuated(h, D, avg_d):
    return h * (avg_d["log"] / np.log(D + 1))


class PNA(Layer):
    """PNA as benchmarks write it: lists of functions, and averages by a dictionary."""

    AVERAGE = 1.7

    def __init__(self):
        super().__init__()
        self.aggregators = [mean, largest, least, deviation]
        self.scalers = [identity, amplified, attenuated]
        self.avg_d = {"log": self.AVERAGE}
        self.pre, self.post = nn.Linear(2 * WIDTH, 4), nn.Linear(48 + WIDTH, 5)

    def pretrans_edges(self, edges):
        return {"e": self.pre(torch.cat([edges.src["h"], edges.dst["k"]], dim=1))}

    def message_func(self, edges):
        return {"e": edges.data["e"]}

    def reduce_func(self, nodes):
        h = nodes.mailbox["e"]
        D = h.shape[-2]
        h = torch.cat([aggregate(h) for aggregate in self.aggregators], dim=1)
        h = torch.cat([scale(h, D=D, avg_d=self.avg_d) for scale in self.scalers], dim=1)
        return {"y": h}

    def passed(self, graph):
        graph.apply_edges(self.pretrans_edges)
        graph.update_all(self.message_func, self.reduce_func)
        return self.post(torch.cat([graph.dstdata["k"], graph.dstdata["y"]], dim=1))


class PNAOfTensor(PNA):
    """The average is a tensor, the messages are maps of both ends."""

    AVERAGE = torch.tensor(1.7)

    def message_func(self, edges):
        return {"e": self.pre(torch.cat([edges.src["h"], edges.dst["k"]], dim=1))}

    def passed(self, graph):
        graph.update_all(self.message_func, self.reduce_func)
        return graph.dstdata["y"]


class Deviation(Layer):
    """Of linear messages."""

    def __init__(self, eps: float = 0.1):
        super().__init__()
        self.eps = eps
        self.pre = nn.Linear(WIDTH, 4)

    def message(self, edges):
        return {"m": self.pre(edges.src["h"].tanh() + 3.0 * edges.dst["k"])}

    def passed(self, graph):
        graph.update_all(self.message, lambda nodes: {
            "y": torch.sqrt(variance(nodes.mailbox["m"]) + self.eps)})
        return graph.dstdata["y"]


class Averaged(Layer):
    """A mean by the size of the mailbox, beside features of the node."""

    def reduce(self, nodes):
        m = nodes.mailbox["m"]
        return {"y": nodes.data["k"] - torch.sum(m, dim=1) / m.size(1),
                "z": math.sqrt(m.shape[1] + 2.5) * m.sum(1) * 2 ** -1}

    def passed(self, graph):
        graph.update_all(lambda edges: {"m": F.elu(edges.src["h"]) * edges.data["w"]}, self.reduce)
        return graph.dstdata["y"] + graph.dstdata["z"]


class InMailbox(Layer):
    """The degree beside messages, of a scalar and of heads."""

    def reduce(self, nodes):
        s, q = nodes.mailbox["s"], nodes.mailbox["q"]
        n, d, heads, width = q.shape
        alpha = torch.sigmoid(s / d ** 0.5)
        return {"y": (alpha.unsqueeze(-1).unsqueeze(-1) * (q - 1 / (d + 1))).sum(1).view(
            n, heads * width)}

    def passed(self, graph):
        graph.srcdata["q"] = graph.srcdata["h"].view(-1, 3, WIDTH // 3)
        graph.srcdata["s"] = graph.srcdata["h"].sum(1)
        graph.update_all(lambda edges: {"q": edges.src["q"] * 2.0, "s": edges.src["s"] * 1.5},
                         self.reduce)
        return graph.dstdata["y"]


class Flat(Layer):
    """As many rows as nodes are in the batch."""

    def passed(self, graph):
        graph.srcdata["q"] = graph.srcdata["h"].view(-1, 3, WIDTH // 3)
        graph.update_all(fn.copy_u("q", "m"), lambda nodes: {
            "y": nodes.mailbox["m"].sum(1).reshape(nodes.batch_size(), -1)})
        return graph.dstdata["y"]


LAYERS = (PNA, PNAOfTensor, Deviation, Averaged, InMailbox, Flat)
