"""node2vec: walks with p and q, and a step of skip-gram. With a large p and q a walk in a triangle
goes round and round, so that all its windows are known."""
import torch
import torch.nn.functional as F
from torch_cluster import random_walk

TRIANGLES, LENGTH = 6, 8
N = 4 * TRIANGLES  # three corners and one node that hangs on the first
pairs = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 3]])
pairs = torch.cat([pairs + 4 * t for t in range(TRIANGLES)])
row, col = torch.cat([pairs, pairs.flip(1)]).t()
start = torch.arange(N)[torch.arange(N) % 4 != 3]
start = start[start % 4 != 0].repeat(3)  # corners from which a walk cannot leave the triangle


def loss_of(windows):
    torch.manual_seed(1)
    emb = torch.randn(N, 4).double().requires_grad_()
    h = emb[windows]
    loss = -F.logsigmoid((h[:, :1] * h[:, 1:]).sum(-1)).mean()
    loss.backward()
    return torch.cat([loss.detach()[None], emb.grad.flatten()])


torch.manual_seed(0)
walks = random_walk(row, col, start, LENGTH, p=1e9, q=1e9, num_nodes=N)
assert walks.shape == (len(start), LENGTH + 1) and torch.equal(walks[:, 0], start)
windows = torch.cat([walks[:, i:i + 3] for i in range(LENGTH - 1)])
result = loss_of(windows.sort(1)[0])


def native():
    corners = torch.div(start, 4, rounding_mode="floor")[:, None] * 4 + torch.arange(3)
    return loss_of(corners.repeat(LENGTH - 1, 1))
