"""Graph classification in batches of small graphs: is it a ring or a tree?

    python examples/dgl/graph_classification.py
    python examples/dgl/graph_classification.py --device cuda --accelerate
"""
from __future__ import annotations

from synthetic import RingsAndTrees, begin, options, report

import dgl
import torch
import torch.nn.functional as F
from dgl.dataloading import GraphDataLoader
from dgl.nn import GINConv
from torch import nn


class Classifier(nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = GINConv(nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(),
                                           nn.Linear(hidden, hidden)))
        self.second = GINConv(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(),
                                            nn.Linear(hidden, hidden)))
        self.leave = nn.Linear(2 * hidden, classes)

    def forward(self, g, x):
        with g.local_scope():
            g.ndata["h"] = F.relu(self.second(g, F.relu(self.first(g, x))))
            return self.leave(torch.cat((dgl.mean_nodes(g, "h"), dgl.max_nodes(g, "h")), 1))


def main(argv: list[str] | None = None) -> dict:
    args = options(__doc__.splitlines()[0], epochs=8, graphs=200, hidden=16,
                   batch=20).parse_args(argv)
    device = begin(args)
    train, test = RingsAndTrees(args.graphs), RingsAndTrees(args.graphs // 2)
    model = Classifier(2, args.hidden, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(args.epochs):
        for g, labels in GraphDataLoader(train, batch_size=args.batch, shuffle=True):
            g, labels = g.to(device), labels.to(device)
            loss = F.cross_entropy(model(g, g.ndata["feat"]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        right = 0
        with torch.no_grad():
            for g, labels in GraphDataLoader(test, batch_size=args.batch):
                g, labels = g.to(device), labels.to(device)
                right += (model(g, g.ndata["feat"]).argmax(1) == labels).sum().item()
        accuracy = right / len(test)
        report(epoch, losses[-1], accuracy)
    return {"losses": losses, "accuracy": accuracy}


if __name__ == "__main__":
    main()
