"""Classifies molecules in batches of small graphs, as it is and with gnnaccel enabled.

    python examples/molecules.py                  # GINConv
    python examples/molecules.py --layer gine     # GINEConv, which sees the bonds
    python examples/molecules.py --layer gatv2    # GATv2Conv with bonds as features of edges

The molecules are made here, from the seed: chains and rings of atoms with branches. The task: is a
nitrogen bound to an oxygen?
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, GINConv, GINEConv, global_add_pool

from both_ways import both_ways, options

ATOMS = torch.tensor([0.6, 0.15, 0.15, 0.1])  # how often: carbon, nitrogen, oxygen, another one
NITROGEN, OXYGEN, BONDS = 1, 2, 3
LAYERS = ("gin", "gine", "gatv2")


def molecule() -> Data:
    """A ring or a chain of 5 to 8 atoms with up to 8 more in branches. ``x`` [N] kinds of atoms,
    ``edge_attr`` [2 * bonds] kinds of bonds, both directions of a bond alike."""
    ring = int(torch.randint(5, 9, ()))
    size = ring + int(torch.randint(0, 9, ()))
    source = torch.arange(1, size)
    target = torch.where(source < ring, source - 1, (torch.rand(size - 1) * source).long())
    if torch.rand(()) < 0.5:
        source = torch.cat([source, torch.tensor([0])])
        target = torch.cat([target, torch.tensor([ring - 1])])
    x = torch.multinomial(ATOMS, size, replacement=True)
    bonds = torch.randint(BONDS, source.shape)
    ends = torch.stack([x[source], x[target]]).sort(0).values
    label = ((ends[0] == NITROGEN) & (ends[1] == OXYGEN)).any()
    edge_index = torch.cat([torch.stack([source, target]), torch.stack([target, source])], 1)
    return Data(x=x, edge_index=edge_index, edge_attr=torch.cat([bonds, bonds]), y=label.long())


class Classifier(torch.nn.Module):
    """Atoms and bonds embedded, three layers, a sum over each molecule."""

    def __init__(self, layer: str, hidden: int) -> None:
        super().__init__()
        self.atoms, self.bonds = torch.nn.Embedding(len(ATOMS),
                                                    hidden), torch.nn.Embedding(BONDS, hidden)
        self.layers = torch.nn.ModuleList(make(layer, hidden) for _ in range(3))
        self.sees_bonds = layer != "gin"
        self.leave = torch.nn.Linear(hidden, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.atoms(batch.x)
        bonds = (self.bonds(batch.edge_attr),) if self.sees_bonds else ()
        for layer in self.layers:
            x = F.relu(layer(x, batch.edge_index, *bonds))
        return self.leave(global_add_pool(x, batch.batch, batch.num_graphs))


def make(layer: str, hidden: int) -> torch.nn.Module:
    if layer == "gatv2":
        return GATv2Conv(hidden, hidden // 4, heads=4, edge_dim=hidden)
    mlp = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.ReLU(),
                              torch.nn.Linear(hidden, hidden))
    return GINConv(mlp) if layer == "gin" else GINEConv(mlp)


def main(given: list[str] | None = None) -> dict:
    parser = options(__doc__, epochs=6, molecules=4000, hidden=64, batch=256)
    parser.add_argument("--layer", choices=LAYERS, default="gin")
    args = parser.parse_args(given)
    torch.manual_seed(args.seed)
    found = [molecule() for _ in range(args.molecules)]
    share = sum(int(one.y) for one in found) / len(found)
    held_out = len(found) // 5
    print(f"{len(found):,} molecules, {share:.0%} with the bond; batches of "
          f"{args.batch} on {args.device}; {args.layer}")

    def train() -> float:
        model = Classifier(args.layer, args.hidden).to(args.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        for _ in range(args.epochs):
            for batch in DataLoader(found[held_out:], args.batch, shuffle=True):
                batch = batch.to(args.device)
                optimizer.zero_grad()
                F.cross_entropy(model(batch), batch.y).backward()
                optimizer.step()
        right = 0
        with torch.no_grad():
            for batch in DataLoader(found[:held_out], args.batch):
                batch = batch.to(args.device)
                right += int((model(batch).argmax(1) == batch.y).sum())
        return right / held_out

    return both_ways(train, args.seed)


if __name__ == "__main__":
    main()
