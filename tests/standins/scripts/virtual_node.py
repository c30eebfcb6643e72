"""Readouts of many graphs by segments, a virtual node and a softmax over each graph's nodes."""
import torch
from torch_scatter import (
    gather_csr,
    scatter_log_softmax,
    scatter_logsumexp,
    scatter_std,
    segment_csr,
    segment_mean_coo,
)

torch.manual_seed(0)
sizes = torch.tensor([4, 7, 2, 9])
batch, ptr = torch.repeat_interleave(torch.arange(4), sizes), torch.cat(
    [torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
x = torch.randn(22, 5).double().requires_grad_()
virtual = segment_csr(x, ptr, reduce="sum")
h = x + gather_csr(virtual, ptr)
attention = scatter_log_softmax(h[:, 0], batch).exp()
readout = torch.cat([segment_mean_coo(h, batch), segment_csr(h, ptr, reduce="max"),
                     segment_csr(attention[:, None] * h, ptr), scatter_logsumexp(h, batch, dim=0)],
                    -1)
spread = scatter_std(h, batch, dim=0, unbiased=False)
(readout.square().sum() + spread.sum()).backward()
result = torch.cat([readout.detach().flatten(), x.grad.flatten()])


def native():
    y = x.detach().clone().requires_grad_()
    rows, spread = [], 0.0
    for part in y.split(sizes.tolist()):
        h = part + part.sum(0)
        soft = h[:, 0].softmax(0)
        rows.append(torch.cat([h.mean(0), h.amax(0), soft @ h, h.logsumexp(0)]))
        spread = spread + h.std(0, unbiased=False).sum()
    readout = torch.stack(rows)
    (readout.square().sum() + spread).backward()
    return torch.cat([readout.detach().flatten(), y.grad.flatten()])
