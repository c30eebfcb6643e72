"""GraphSAGE in batches of sampled neighbourhoods.

    python examples/dgl/sage_sampling.py
    python examples/dgl/sage_sampling.py --device cuda --accelerate --workers 4

The graph and its features stay on the CPU; each batch goes to the device.
"""
from __future__ import annotations

from synthetic import begin, communities, options, report

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv
from torch import nn


class SAGE(nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(inputs, hidden, "mean"),
                                     SAGEConv(hidden, classes, "mean")])

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks):
            x = layer(block, x)
            if layer is not self.layers[-1]:
                x = F.relu(x)
        return x


def evaluate(model: SAGE, loader) -> float:
    """The share of seed nodes that are classified correctly."""
    model.eval()
    right, seen = 0, 0
    with torch.no_grad():
        for _, seeds, blocks in loader:
            scores = model(blocks, blocks[0].srcdata["feat"])
            right += (scores.argmax(1) == blocks[-1].dstdata["label"]).sum().item()
            seen += len(seeds)
    return right / seen


def main(argv: list[str] | None = None, **loading) -> dict:
    """``loading``: further options of DGL's DataLoader."""
    sizes = {"nodes": 600, "degree": 8, "hidden": 16, "batch": 100, "fanout": 5, "workers": 0}
    args = options(__doc__.splitlines()[0], epochs=5, **sizes).parse_args(argv)
    device = begin(args)
    g = communities(args.nodes, args.degree)
    model = SAGE(g.ndata["feat"].shape[1], args.hidden, int(g.ndata["label"].max()) + 1).to(device)
    train = g.ndata["train"]

    def loader(mask, shuffle):
        sampler = dgl.dataloading.NeighborSampler([args.fanout] * 2, prefetch_node_feats=["feat"],
                                                  prefetch_labels=["label"])
        return dgl.dataloading.DataLoader(g, torch.nonzero(mask).flatten(), sampler, device=device,
                                          batch_size=args.batch, shuffle=shuffle,
                                          num_workers=args.workers, **loading)

    batches, held_out = loader(train, True), loader(~train, False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(args.epochs):
        model.train()
        for _, _, blocks in batches:
            loss = F.cross_entropy(model(blocks, blocks[0].srcdata["feat"]),
                                   blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        accuracy = evaluate(model, held_out)
        report(epoch, losses[-1], accuracy)
    return {"losses": losses, "accuracy": accuracy}


if __name__ == "__main__":
    main()
