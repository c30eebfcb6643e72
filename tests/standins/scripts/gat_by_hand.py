"""A GAT layer written over torch_scatter, as in many re-implementations; trained for some steps."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_scatter import scatter_add
from torch_scatter.composite import scatter_softmax


class GATLayer(nn.Module):
    def __init__(self, in_dim, out_dim, heads):
        super().__init__()
        self.heads, self.out_dim = heads, out_dim
        self.a_src = nn.Parameter(torch.randn(1, heads, out_dim) * 0.1)
        self.a_dst = nn.Parameter(torch.randn(1, heads, out_dim) * 0.1)
        self.lin = nn.Linear(in_dim, heads * out_dim, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        h = self.lin(x).view(-1, self.heads, self.out_dim)
        e = F.leaky_relu((h * self.a_src).sum(-1)[src] + (h * self.a_dst).sum(-1)[dst], 0.2)
        alpha = scatter_softmax(e, dst, dim=0)
        out = scatter_add(alpha.unsqueeze(-1) * h[src], dst, dim=0, dim_size=x.size(0))
        return out.flatten(1)


def train(layer, steps=4):
    opt = torch.optim.Adam(layer.parameters(), lr=0.01)
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(layer(x, edge_index), y)
        loss.backward()
        opt.step()
    return torch.stack([p.detach().norm() for p in layer.parameters()] + [loss.detach()])


torch.manual_seed(0)
x, y = torch.randn(40, 8).double(), torch.randint(0, 12, (40,))
edge_index = torch.cat([torch.randint(0, 40, (2, 200)), torch.arange(40).repeat(2, 1)], 1)
torch.manual_seed(1)
result = train(GATLayer(8, 3, 4).double())


def native():
    from torch_geometric.nn import GATConv

    torch.manual_seed(1)
    ours, layer = GATLayer(8, 3, 4).double(), GATConv(8, 3, 4, add_self_loops=False, bias=False)
    layer = layer.double()
    with torch.no_grad():
        layer.lin.weight.copy_(ours.lin.weight)
        layer.att_src.copy_(ours.a_src)
        layer.att_dst.copy_(ours.a_dst)
    found = train(layer)
    order = {id(p): n for p, n in zip(layer.parameters(), found)}
    return torch.stack([order[id(p)] for p in (layer.att_src, layer.att_dst, layer.lin.weight)]
                       + [found[-1]])

