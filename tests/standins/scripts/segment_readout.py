"""GraphNorm by segments and readouts of every kind, over graphs of which one is empty."""
import torch
from torch import nn
from torch_scatter import gather_csr, segment_csr

sizes = [5, 0, 8, 3]
ptr = torch.tensor([0, 5, 5, 13, 16])
torch.manual_seed(0)
x = torch.randn(16, 4).double().requires_grad_()
alpha, lin = nn.Parameter(torch.rand(4).double()), nn.Linear(16, 3).double()
mean = gather_csr(segment_csr(x, ptr, reduce="mean"), ptr)
h = x - alpha * mean
h = h / (gather_csr(segment_csr(h.square(), ptr, reduce="mean"), ptr) + 1e-5).sqrt()
readout = torch.cat([segment_csr(h, ptr, reduce=reduce) for reduce in ("sum", "mean", "min", "max")],
                    -1)
out = lin(readout)
out.square().sum().backward()
result = torch.cat([out.detach().flatten(), x.grad.flatten(), alpha.grad, lin.weight.grad.flatten()])


def native():
    y, a = x.detach().clone().requires_grad_(), alpha.detach().clone().requires_grad_()
    lin.zero_grad()
    rows = []
    for part in y.split(sizes):
        if not len(part):
            rows.append(torch.zeros(16).double())
            continue
        h = part - a * part.mean(0)
        h = h / (h.square().mean(0) + 1e-5).sqrt()
        rows.append(torch.cat([h.sum(0), h.mean(0), h.amin(0), h.amax(0)]))
    out = lin(torch.stack(rows))
    out.square().sum().backward()
    return torch.cat([out.detach().flatten(), y.grad.flatten(), a.grad, lin.weight.grad.flatten()])
