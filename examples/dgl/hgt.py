"""Heterogeneous graph transformer: the subject of a paper, from papers, authors and topics.

    python examples/dgl/hgt.py
    python examples/dgl/hgt.py --device cuda --accelerate
"""
from __future__ import annotations

from synthetic import begin, options, papers, report

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import HGTConv
from torch import nn


class HGT(nn.Module):
    def __init__(self, inputs: int, hidden: int, heads: int, classes: int, ntypes: int,
                 etypes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, hidden * heads)
        self.layers = nn.ModuleList(HGTConv(hidden * heads, hidden, heads, ntypes, etypes,
                                            dropout=0.0) for _ in range(2))
        self.leave = nn.Linear(hidden * heads, classes)

    def forward(self, g, x, ntypes, etypes):
        x = F.relu(self.enter(x))
        for layer in self.layers:
            x = layer(g, x, ntypes, etypes, presorted=True)
        return self.leave(x)


def main(argv: list[str] | None = None) -> dict:
    args = options(__doc__.splitlines()[0], epochs=20, nodes=400, degree=4, hidden=8,
                   heads=4).parse_args(argv)
    device = begin(args)
    whole = papers(args.nodes, args.degree)
    inputs = whole.nodes["paper"].data["feat"].shape[1]
    model = HGT(inputs, args.hidden, args.heads, 4, len(whole.ntypes), len(whole.etypes)).to(device)
    paper = whole.get_ntype_id("paper")
    labels, train = whole.nodes["paper"].data["label"].to(device), whole.nodes["paper"].data[
        "train"].to(device)
    g = dgl.to_homogeneous(whole, ndata=["feat"]).to(device)
    papers_only = torch.nonzero(g.ndata[dgl.NTYPE] == paper).flatten()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(args.epochs):
        scores = model(g, g.ndata["feat"], g.ndata[dgl.NTYPE], g.edata[dgl.ETYPE])[papers_only]
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
