"""Skip-gram pairs of random walks; on a ring that is directed every walk is known beforehand."""
import torch
from torch_cluster import random_walk
from torch_sparse import SparseTensor

N, LENGTH, CONTEXT = 15, 6, 3
edge_index = torch.stack([torch.arange(N), (torch.arange(N) + 4) % N])
row, col = edge_index
adj = SparseTensor(row=row, col=col, sparse_sizes=(N, N))


def pos_sample(batch):
    rw = random_walk(row, col, batch, LENGTH, 2.0, 0.5, num_nodes=N)
    rw2 = adj.random_walk(batch, LENGTH)
    windows = [rw[:, j:j + CONTEXT] for j in range(1 + LENGTH + 1 - CONTEXT)]
    return torch.cat([*windows, *(rw2[:, j:j + CONTEXT] for j in range(2))], dim=0)


result = pos_sample(torch.arange(N).repeat(2)).double()


def native():
    walk = (torch.arange(N).repeat(2)[:, None] + 4 * torch.arange(LENGTH + 1)) % N
    windows = [walk[:, j:j + CONTEXT] for j in range(LENGTH + 2 - CONTEXT)]
    return torch.cat([*windows, *windows[:2]]).double()
