"""GraphSAGE in batches of sampled neighbourhoods, as it is and with gnnaccel enabled.

    python examples/sage_sampling.py                     # the code graph of the installed packages
    python examples/sage_sampling.py --data graph.npz    # any file with edge_index [2, E], x [N, F]
    and y [N]

PyG's NeighborLoader needs pyg-lib or torch-sparse. The sampler below gives the same batches, its
seeds first, with torch alone; graph and features stay on the CPU, each batch goes to the device.
"""
from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from both_ways import both_ways, options
from quickstart_data import load_data


class SAGE(torch.nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = SAGEConv(inputs, hidden)
        self.second = SAGEConv(hidden, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x, edge_index)), edge_index)


class Neighbours:
    """Samples of a graph of N nodes: ``fanout`` edges into each node, for as many ``hops`` as the
    model has layers."""

    def __init__(self, edge_index: torch.Tensor, num_nodes: int, fanout: int, hops: int) -> None:
        order = torch.argsort(edge_index[1], stable=True)
        self.sources, self.num_nodes, self.fanout, self.hops = (edge_index[0, order], num_nodes,
                                                                fanout, hops)
        self.degree = torch.bincount(edge_index[1], minlength=num_nodes)
        self.begin = self.degree.cumsum(0) - self.degree

    def sample(self, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Nodes [n], the seeds first, and the edges [2, e] among them, numbered by place in the
        nodes. Edges are drawn with replacement and then kept once."""
        place = torch.full((self.num_nodes,), -1)
        place[seeds] = torch.arange(len(seeds))
        nodes, front, edges = seeds, seeds, []
        for _ in range(self.hops):
            front = front[self.degree[front] > 0]
            drawn = self.begin[front,
                               None] + (torch.rand(len(front),
                                                   self.fanout) * self.degree[front, None]).long()
            drawn = torch.unique(drawn)
            source = self.sources[drawn]
            target = torch.searchsorted(self.begin, drawn, right=True) - 1
            new = torch.unique(source[place[source] < 0])
            place[new] = torch.arange(len(nodes), len(nodes) + len(new))
            nodes, front = torch.cat([nodes, new]), new
            edges.append(torch.stack([place[source], place[target]]))
        return nodes, torch.cat(edges, 1)


def batches(sampler: Neighbours, data, seeds: torch.Tensor, size: int, shuffle: bool,
            device: str) -> Iterator[Data]:
    """As NeighborLoader gives them: ``batch_size`` seeds, which come first."""
    for some in (seeds[torch.randperm(len(seeds))] if shuffle else seeds).split(size):
        nodes, edge_index = sampler.sample(some)
        yield Data(x=data.x[nodes], y=data.y[some], edge_index=edge_index,
                   batch_size=len(some)).to(device)


def main(given: list[str] | None = None) -> dict:
    parser = options(__doc__, epochs=2, hidden=64, batch=1024, fanout=10)
    parser.add_argument("--data", default="code",
                        help="code (default), cora, or the path of an .npz file")
    args = parser.parse_args(given)
    data = load_data(args.data, torch.device("cpu"))
    sampler = Neighbours(data.edge_index, len(data.x), args.fanout, hops=2)
    train_seeds, test_seeds = (torch.nonzero(mask).flatten()
                               for mask in (data.train_mask, data.test_mask))
    print(f"{data.title}: {len(data.x):,} nodes, {data.edge_index.shape[1]:,} "
          f"edges; batches of {args.batch} on {args.device}")

    def train() -> float:
        model = SAGE(data.x.shape[1], args.hidden, data.classes).to(args.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(args.epochs):
            for batch in batches(sampler, data, train_seeds, args.batch, True, args.device):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch.x, batch.edge_index)[:batch.batch_size], batch.y)
                loss.backward()
                optimizer.step()
        right = 0
        with torch.no_grad():
            for batch in batches(sampler, data, test_seeds, args.batch, False, args.device):
                right += int((model(batch.x,
                                    batch.edge_index)[:batch.batch_size].argmax(
                                        1) == batch.y).sum())
        return right / len(test_seeds)

    return both_ways(train, args.seed)


if __name__ == "__main__":
    main()
