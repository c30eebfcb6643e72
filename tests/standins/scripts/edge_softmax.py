"""Attention with features of edges: scatter_softmax over the edges that enter a node, two layers."""
import torch
from torch import nn
from torch_scatter import scatter_softmax, scatter_sum

N, HEADS, WIDTH = 18, 2, 3
torch.manual_seed(0)
src, dst = torch.randint(0, N, (2, 70))
x, e = torch.randn(N, HEADS * WIDTH).double(), torch.randn(70, 4).double()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(3))
        self.e = nn.Linear(4, HEADS)

    def forward(self, x, summed):
        q, k, v = (lin(x).view(N, HEADS, WIDTH) for lin in (self.q, self.k, self.v))
        score = (q[dst] * k[src]).sum(-1) / WIDTH ** 0.5 + self.e(e)
        return x + summed(score, v[src]).flatten(1).tanh()


layers = nn.ModuleList([Layer(), Layer()]).double()


def run(summed):
    layers.zero_grad()
    h = x
    for layer in layers:
        h = layer(h, summed)
    h.square().sum().backward()
    return torch.cat([h.detach().flatten(), *(p.grad.flatten() for p in layers.parameters())])


def by_scatter(score, values):
    alpha = scatter_softmax(score, dst, dim=0)
    return scatter_sum(alpha[..., None] * values, dst, dim=0, dim_size=N)


result = run(by_scatter)


def native():
    enters = torch.arange(N)[:, None] == dst

    def by_hand(score, values):
        masked = score.t()[:, None].masked_fill(~enters, -torch.inf).softmax(-1)
        return torch.einsum("hne,ehw->nhw", masked.nan_to_num(), values)

    return run(by_hand)
