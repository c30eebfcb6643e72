"""Features from nodes two hops away: the product of a SparseTensor with itself, normalised."""
import torch
from torch_sparse import SparseTensor, matmul, mul, remove_diag, set_diag, spspmm
from torch_sparse import sum as sparse_sum

N = 16
torch.manual_seed(0)
edge_index = torch.randint(0, N, (2, 45)).unique(dim=1)
value = torch.rand(edge_index.size(1)).double().requires_grad_()
x = torch.randn(N, 5).double().requires_grad_()
adj = SparseTensor(row=edge_index[0], col=edge_index[1], value=value, sparse_sizes=(N, N))
two = remove_diag(adj @ adj)
both = set_diag(adj.t())
degree = sparse_sum(two, dim=1)
scale = torch.where(degree > 0, degree, 1.0).rsqrt()
out = matmul(mul(two, scale.view(-1, 1)), x) + matmul(both, x, reduce="mean")
index, product = spspmm(edge_index, value, edge_index.flip(0), value, N, N, N)
out = out + torch.zeros(N, N).double().index_put(tuple(index), product) @ x
out.square().sum().backward()
result = torch.cat([out.detach().flatten(), value.grad, x.grad.flatten()])


def native():
    v, y = value.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    eye = torch.eye(N).double()
    dense = torch.zeros(N, N).double().index_put(tuple(edge_index), v)
    pattern = torch.zeros(N, N).double()
    pattern[tuple(edge_index)] = 1
    two = dense @ dense * (1 - eye)
    degree = two.sum(1)
    scale = torch.where(degree > 0, degree, 1.0).rsqrt()
    both = dense.t() * (1 - eye) + eye
    count = (pattern.t() * (1 - eye) + eye).sum(1, keepdim=True)
    out = scale[:, None] * two @ y + both @ y / count + dense @ dense.t() @ y
    out.square().sum().backward()
    return torch.cat([out.detach().flatten(), v.grad, y.grad.flatten()])
