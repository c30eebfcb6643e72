"""Data and options that the DGL examples share. Everything is made here, from a seed: nothing is
downloaded."""
from __future__ import annotations

import argparse

# before dgl, which on a current torch does not import without it; changes nothing else
import gnnaccel
import dgl
import numpy
import torch
from torch import Tensor


def options(description: str, epochs: int, **sizes: int) -> argparse.ArgumentParser:
    """A parser with what all examples take, and an option for each of ``sizes``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--accelerate", action="store_true", help="switch gnnaccel on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=epochs)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser


def begin(args: argparse.Namespace) -> torch.device:
    """Seeds everything, switches gnnaccel on where asked to, and returns the device."""
    torch.manual_seed(args.seed)
    numpy.random.seed(args.seed)
    dgl.seed(args.seed)
    if args.accelerate:
        gnnaccel.enable()
    return torch.device(args.device)


def report(epoch: int, loss: float, accuracy: float) -> None:
    """One line per epoch."""
    print(f"epoch {epoch:3d}  loss {loss:.4f}  accuracy {accuracy:.4f}")


def _noisy(labels: Tensor, classes: int, width: int) -> Tensor:
    """[N, width] features that say little about the label: their class's direction under much
    noise."""
    return 0.6 * torch.randn(classes, width)[labels] + torch.randn(len(labels), width)


def _friends(src: Tensor, dst_label: Tensor, src_label: Tensor, share: float) -> Tensor:
    """For each of ``src`` a destination, with probability ``share`` one of the same label."""
    alike = torch.rand(len(src)) < share
    found = torch.randint(len(dst_label), (len(src),))
    order = torch.argsort(dst_label, stable=True)
    begin = torch.searchsorted(dst_label[order], src_label[src])
    end = torch.searchsorted(dst_label[order], src_label[src], right=True)
    inside = begin + (torch.rand(len(src)) * (end - begin)).long()
    return torch.where(alike & (end > begin), order[inside.clamp(max=len(order) - 1)], found)


def communities(nodes: int, degree: int, classes: int = 4, width: int = 16) -> dgl.DGLGraph:
    """A graph in which most edges join nodes of one class. ``ndata``: feat, label, train (half of
    the nodes)."""
    label = torch.randint(classes, (nodes,))
    src = torch.arange(nodes).repeat_interleave(degree)
    g = dgl.graph((src, _friends(src, label, label, 0.8)), num_nodes=nodes)
    g = dgl.add_self_loop(dgl.remove_self_loop(dgl.to_bidirected(g)))
    g.ndata["feat"], g.ndata["label"] = _noisy(label, classes, width), label
    g.ndata["train"] = torch.rand(nodes) < 0.5
    return g


def papers(nodes: int, degree: int, classes: int = 4, width: int = 16) -> dgl.DGLGraph:
    """Papers, authors and topics. Each paper has authors and topics of its class, and cites papers
    of its class; only papers have labels and ``train``, and all nodes features."""
    sizes = {"paper": nodes, "author": nodes // 2, "topic": max(nodes // 10, classes)}
    label = {kind: torch.randint(classes, (size,)) for kind, size in sizes.items()}
    edges = {}
    for name, kind, share in (("cites", "paper", 0.7), ("written-by", "author", 0.8),
                              ("about", "topic", 0.8)):
        src = torch.arange(nodes).repeat_interleave(degree)
        dst = _friends(src, label[kind], label["paper"], share)
        edges["paper", name, kind], edges[kind, f"rev-{name}", "paper"] = (src, dst), (dst, src)
    g = dgl.heterograph(edges, num_nodes_dict=sizes)
    for kind in g.ntypes:
        g.nodes[kind].data["feat"] = _noisy(label[kind], classes, width)
    g.nodes["paper"].data["label"], g.nodes["paper"].data["train"] = label["paper"], torch.rand(
        nodes) < 0.5
    return g


class RingsAndTrees(torch.utils.data.Dataset):
    """Small graphs: rings (label 0) and trees (label 1), in which every node knows its degree under
    some noise."""

    def __init__(self, count: int) -> None:
        self.items = [self._item(index % 2) for index in range(count)]

    @staticmethod
    def _item(label: int) -> tuple[dgl.DGLGraph, int]:
        size = int(torch.randint(6, 14, ()))
        child = torch.arange(1, size)
        if label:
            src, dst = child, (torch.rand(size - 1) * child).long()
        else:
            src, dst = torch.arange(size), torch.arange(1, size + 1) % size
        g = dgl.add_self_loop(dgl.graph((torch.cat((src, dst)), torch.cat((dst, src))),
                                        num_nodes=size))
        g.ndata["feat"] = torch.cat((g.in_degrees()[:, None].float(), torch.ones(size, 1)),
                                    1) + 0.1 * torch.randn(size, 2)
        return g, label

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[dgl.DGLGraph, int]:
        return self.items[index]
