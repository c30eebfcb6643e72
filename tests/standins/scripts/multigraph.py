"""Parallel edges of a multigraph joined into one, in each way that coalesce knows."""
import torch
from torch_sparse import coalesce, spmm, transpose

N, M = 9, 7
torch.manual_seed(0)
index = torch.stack([torch.randint(0, N, (60,)), torch.randint(0, M, (60,))])
weight, x = torch.rand(60).double(), torch.randn(M, 3).double()
features = torch.randn(60, 4).double()
parts = []
for op in ("add", "mean", "min", "max"):
    w = weight.clone().requires_grad_()
    joined, value = coalesce(index, w, N, M, op=op)
    (back, turned) = transpose(joined, value, N, M)
    (spmm(joined, value, N, M, x).square().sum() + (turned * back[0]).sum()).backward()
    parts += [joined.flatten().double(), value.detach(), back.flatten().double(), w.grad]
parts.append(coalesce(index, features, N, M)[1].flatten())
result = torch.cat(parts)


def native():
    reduces = {"add": torch.sum, "mean": torch.mean, "min": torch.amin, "max": torch.amax}
    places = sorted(set(map(tuple, index.t().tolist())))
    joined = torch.tensor(places).t()
    same = [(index == torch.tensor(place)[:, None]).all(0) for place in places]
    order = sorted(range(len(places)), key=lambda i: places[i][::-1])
    found = []
    for reduce in reduces.values():
        w = weight.clone().requires_grad_()
        value = torch.stack([reduce(w[at], 0) for at in same])
        dense = torch.zeros(N, M).double().index_put(tuple(joined), value)
        back = joined.flip(0)[:, order]
        ((dense @ x).square().sum() + (value[order] * back[0]).sum()).backward()
        found += [joined.flatten().double(), value.detach(), back.flatten().double(), w.grad]
    found.append(torch.stack([features[at].sum(0) for at in same]).flatten())
    return torch.cat(found)
