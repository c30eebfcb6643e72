"""GAT on a whole graph: which community does a node belong to?

    python examples/dgl/gat.py
    python examples/dgl/gat.py --device cuda --accelerate
"""
from __future__ import annotations

from synthetic import begin, communities, options, report

import torch
import torch.nn.functional as F
from dgl.nn import GATConv
from torch import nn


class GAT(nn.Module):
    def __init__(self, inputs: int, hidden: int, heads: int, classes: int) -> None:
        super().__init__()
        self.first = GATConv(inputs, hidden, heads, activation=F.elu)
        self.second = GATConv(hidden * heads, classes, 1)

    def forward(self, g, x):
        return self.second(g, self.first(g, x).flatten(1)).mean(1)


def main(argv: list[str] | None = None) -> dict:
    args = options(__doc__.splitlines()[0], epochs=30, nodes=600, degree=8, hidden=8,
                   heads=4).parse_args(argv)
    device = begin(args)
    g = communities(args.nodes, args.degree)
    model = GAT(g.ndata["feat"].shape[1], args.hidden, args.heads,
                int(g.ndata["label"].max()) + 1).to(device)
    g = g.to(device)
    x, y, train = g.ndata["feat"], g.ndata["label"], g.ndata["train"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for epoch in range(args.epochs):
        model.train()
        scores = model(g, x)
        loss = F.cross_entropy(scores[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(g, x).argmax(1) == y)[~train].float().mean().item()
        losses.append(loss.item())
        report(epoch, losses[-1], accuracy)
    return {"losses": losses, "accuracy": accuracy}


if __name__ == "__main__":
    main()
