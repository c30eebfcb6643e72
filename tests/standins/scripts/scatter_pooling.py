"""Pooling in steps: nodes into clusters by mean and maximum, clusters into graphs by a gated sum."""
import torch
from torch import nn
from torch_scatter import scatter, scatter_add, scatter_max, scatter_mean

torch.manual_seed(0)
sizes = [6, 9, 5]
graph = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
cluster = torch.cat([torch.randint(0, 3, (n,)) + 3 * g for g, n in enumerate(sizes)])
cluster = cluster.unique(return_inverse=True)[1]
x, y = torch.randn(len(graph), 6).double(), torch.tensor([0, 1, 1])
net = nn.ModuleDict({"in": nn.Linear(6, 8), "gate": nn.Linear(16, 1), "out": nn.Linear(16, 2)})
net = net.double()


def trained(forward):
    net.load_state_dict(start)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        opt.zero_grad()
        out = forward(net["in"](x).tanh())
        nn.functional.cross_entropy(out, y).backward()
        opt.step()
    return torch.cat([p.detach().flatten() for p in (*net.parameters(), out)])


def pooled(h):
    of_cluster = scatter_max(graph, cluster, dim=0)[0]
    h = torch.cat([scatter_mean(h, cluster, dim=0), scatter(h, cluster, dim=0, reduce="max")], -1)
    gate = net["gate"](h).sigmoid()
    return net["out"](scatter_add(gate * h, of_cluster, dim=0))


start = {name: value.clone() for name, value in net.state_dict().items()}
result = trained(pooled)


def native():
    def by_hand(h):
        rows = []
        for g in range(3):
            total = 0.0
            for c in cluster[graph == g].unique():
                part = h[cluster == c]
                both = torch.cat([part.mean(0), part.amax(0)])
                total = total + net["gate"](both).sigmoid() * both
            rows.append(total)
        return net["out"](torch.stack(rows))

    return trained(by_hand)
