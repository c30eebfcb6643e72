"""Two-hop edges of a Graph U-Net, made by products of sparse matrices given as indices."""
import torch
from torch_sparse import coalesce, spmm, spspmm, transpose

torch.manual_seed(0)
N = 20
edge_index = torch.randint(0, N, (2, 50))
edge_weight = torch.rand(50).double().requires_grad_()


def augment_adj(edge_index, edge_weight, num_nodes):
    loops = torch.arange(num_nodes).repeat(2, 1)
    index = torch.cat([edge_index, loops], dim=1)
    weight = torch.cat([edge_weight, torch.ones(num_nodes).double()])
    index, weight = coalesce(index, weight, num_nodes, num_nodes)
    index, weight = spspmm(index, weight, index, weight, num_nodes, num_nodes, num_nodes)
    mask = index[0] != index[1]
    return index[:, mask], weight[mask]


index, weight = augment_adj(edge_index, edge_weight, N)
x = torch.randn(N, 4).double()
out = spmm(index, weight, N, N, x)
index_t, weight_t = transpose(index, weight, N, N)
out_t = spmm(index_t, weight_t, N, N, x)
(out.square().sum() + out_t.sum()).backward()
result = torch.cat([out.detach().flatten(), out_t.detach().flatten(), edge_weight.grad])


def native():
    weight = edge_weight.detach().clone().requires_grad_()
    dense = torch.eye(N).double().index_put(tuple(edge_index), weight, accumulate=True)
    dense = dense @ dense
    dense = dense * (1 - torch.eye(N).double())
    out, out_t = dense @ x, dense.t() @ x
    (out.square().sum() + out_t.sum()).backward()
    return torch.cat([out.detach().flatten(), out_t.detach().flatten(), weight.grad])
