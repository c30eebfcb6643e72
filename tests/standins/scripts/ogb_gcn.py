"""A GCN over `adj_t`, normalised beforehand, as in examples of the Open Graph Benchmark."""
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_sparse import SparseTensor

torch.manual_seed(0)
data = Data(x=torch.randn(30, 8), edge_index=torch.randint(0, 30, (2, 80)).unique(dim=1))
edge_index = data.edge_index
data = T.ToSparseTensor()(data)
data.adj_t = data.adj_t.to_symmetric()
assert isinstance(data.adj_t, SparseTensor)


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GCNConv(8, 16, normalize=False), SAGEConv(16, 16),
                                          GCNConv(16, 4, cached=True)])

    def forward(self, x, adj_t, plain):
        for conv in self.convs[:-1]:
            x = F.relu(conv(x, adj_t if isinstance(conv, GCNConv) else plain))
        return self.convs[-1](x, plain).log_softmax(dim=-1)


adj_t = data.adj_t.set_diag()
deg = adj_t.sum(dim=1).to(torch.float)
deg_inv_sqrt = deg.pow(-0.5)
deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
adj_t = adj_t * deg_inv_sqrt.view(-1, 1) * deg_inv_sqrt.view(1, -1)

model = GCN()
out = model(data.x, adj_t, data.adj_t)
out.exp().square().sum().backward()
result = torch.cat([out.detach().flatten(), model.convs[0].lin.weight.grad.flatten()])


def native():
    from torch_geometric.nn.conv.gcn_conv import gcn_norm
    from torch_geometric.utils import to_undirected

    model.zero_grad()
    both = to_undirected(edge_index)
    normed, weight = gcn_norm(both, num_nodes=30)
    first, second, third = model.convs
    third._cached_adj_t = third._cached_edge_index = None
    third.cached = False
    x = F.relu(first(data.x, normed, weight))
    x = F.relu(second(x, both))
    out = third(x, both).log_softmax(dim=-1)
    out.exp().square().sum().backward()
    return torch.cat([out.detach().flatten(), model.convs[0].lin.weight.grad.flatten()])
