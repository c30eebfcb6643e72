"""GraphSAGE with a mean aggregator, over torch_scatter, and a readout by maximum per graph."""
import torch
from torch import nn
from torch_scatter import scatter, scatter_max, scatter_mean


class SAGE(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.self_lins = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        self.neigh_lins = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(dims, dims[1:]))

    def forward(self, x, edge_index, batch, mean=scatter_mean, pool=None):
        row, col = edge_index
        for lin_s, lin_n in zip(self.self_lins, self.neigh_lins):
            x = torch.relu(lin_s(x) + lin_n(mean(x[row], col, dim=0, dim_size=x.size(0))))
        if pool is not None:
            return pool(x, batch)
        hi, _ = scatter_max(x, batch, dim=0)
        return torch.cat([hi, scatter(x, batch, dim=0, reduce="sum")], dim=-1)


torch.manual_seed(0)
model = SAGE([6, 16, 5]).double()
x, edge_index = torch.randn(50, 6).double(), torch.randint(0, 50, (2, 160))
batch = torch.arange(50) // 10
out = model(x, edge_index, batch)
out.square().sum().backward()
result = torch.cat([out.detach().flatten(), model.neigh_lins[0].weight.grad.flatten()])


def native():
    from torch_geometric.nn import global_add_pool, global_max_pool

    def mean(messages, index, dim, dim_size):
        adj = torch.zeros(dim_size, len(index)).double()
        adj[index, torch.arange(len(index))] = 1
        return adj @ messages / adj.sum(1, keepdim=True).clamp(min=1)

    def pool(x, batch):
        return torch.cat([global_max_pool(x, batch), global_add_pool(x, batch)], -1)

    model.zero_grad()
    out = model(x, edge_index, batch, mean, pool)
    out.square().sum().backward()
    return torch.cat([out.detach().flatten(), model.neigh_lins[0].weight.grad.flatten()])
