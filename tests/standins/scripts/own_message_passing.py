"""A user's MessagePassing class with message_and_aggregate over a SparseTensor, beside layers of
PyG that get the same SparseTensor."""
import torch
from torch_geometric.nn import APPNP, GATv2Conv, GINConv, MessagePassing, TransformerConv
from torch_sparse import SparseTensor, fill_diag, matmul, mul, sum as sparse_sum


class Diffusion(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")

    def forward(self, x, adj_t):
        adj_t = fill_diag(adj_t, 1.0)
        deg = sparse_sum(adj_t, dim=1)
        adj_t = mul(adj_t, deg.pow(-1.0).view(-1, 1))
        return self.propagate(adj_t, x=x)

    def message_and_aggregate(self, adj_t, x):
        return matmul(adj_t, x, reduce=self.aggr)


torch.manual_seed(0)
edge_index = torch.randint(0, 30, (2, 90)).unique(dim=1)
edge_index = edge_index[:, edge_index[0] != edge_index[1]]
x = torch.randn(30, 6)
adj_t = SparseTensor.from_edge_index(edge_index.flip(0), torch.ones(edge_index.size(1)),
                                     sparse_sizes=(30, 30))
layers = [GATv2Conv(6, 4, 2), TransformerConv(6, 4), GINConv(torch.nn.Linear(6, 4)), APPNP(3, 0.1)]
outs = [Diffusion()(x, adj_t), *(layer(x, adj_t) for layer in layers)]
result = torch.cat([out.detach().flatten() for out in outs])


def native():
    dense = torch.eye(30)
    dense[edge_index[1], edge_index[0]] = 1
    outs = [dense / dense.sum(1, keepdim=True) @ x, *(layer(x, edge_index) for layer in layers)]
    return torch.cat([out.detach().flatten() for out in outs])
