"""RGCN on a graph with several relations, as one graph whose edges have types: the subject of a
paper.

    python examples/dgl/rgcn.py
    python examples/dgl/rgcn.py --device cuda --accelerate
"""
from __future__ import annotations

from synthetic import begin, options, papers, report

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import RelGraphConv
from torch import nn


class RGCN(nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int, relations: int, bases: int) -> None:
        super().__init__()
        self.first = RelGraphConv(inputs, hidden, relations, "basis", bases, activation=F.relu)
        self.second = RelGraphConv(hidden, classes, relations, "basis", bases)

    def forward(self, g, x, etypes, norm):
        return self.second(g, self.first(g, x, etypes, norm), etypes, norm)


def main(argv: list[str] | None = None) -> dict:
    args = options(__doc__.splitlines()[0], epochs=30, nodes=400, degree=4, hidden=16,
                   bases=4).parse_args(argv)
    device = begin(args)
    whole = papers(args.nodes, args.degree)
    model = RGCN(whole.nodes["paper"].data["feat"].shape[1], args.hidden, 4, len(whole.etypes),
                 args.bases).to(device)
    paper = whole.get_ntype_id("paper")
    labels, train = whole.nodes["paper"].data["label"].to(device), whole.nodes["paper"].data[
        "train"].to(device)
    g = dgl.to_homogeneous(whole, ndata=["feat"]).to(device)
    papers_only = torch.nonzero(g.ndata[dgl.NTYPE] == paper).flatten()
    norm = (1 / g.in_degrees(g.edges()[1]).clamp(min=1).float())[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for epoch in range(args.epochs):
        scores = model(g, g.ndata["feat"], g.edata[dgl.ETYPE], norm)[papers_only]
        loss = F.cross_entropy(scores[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        accuracy = (scores.argmax(1) == labels)[~train].float().mean().item()
        report(epoch, losses[-1], accuracy)
    return {"losses": losses, "accuracy": accuracy}


if __name__ == "__main__":
    main()
