"""Set abstraction of PointNet++: farthest points, balls around them, a PointNetConv."""
import torch
from torch_cluster import fps, nearest, radius
from torch_geometric.nn import PointNetConv
from torch_scatter import scatter_mean

torch.manual_seed(0)
pos, batch = torch.rand(80, 3), torch.arange(80) // 40
conv = PointNetConv(torch.nn.Linear(3, 8), add_self_loops=False)
idx = fps(pos, batch, ratio=0.25, random_start=False)
row, col = radius(pos, pos[idx], 0.4, batch, batch[idx], max_num_neighbors=64)
x = conv((None, None), (pos, pos[idx]), torch.stack([col, row]))
up = x[nearest(pos, pos[idx], batch, batch[idx])]
result = torch.cat([x.detach().flatten(), scatter_mean(up, batch, dim=0).detach().flatten()])


def native():
    chosen = []
    for b in range(2):
        points, picks = pos[batch == b], [0]
        while len(picks) < 10:
            picks.append(int(torch.cdist(points, points[picks]).amin(1).argmax()))
        chosen += [p + 40 * b for p in picks]
    apart = torch.cdist(pos[chosen], pos, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart.masked_fill(batch[chosen][:, None] != batch, float("inf"))
    row, col = (apart < 0.4).nonzero().t()
    x = conv((None, None), (pos, pos[chosen]), torch.stack([col, row]))
    up = x[apart.argmin(0)]
    mean = torch.stack([up[batch == b].mean(0) for b in range(2)])
    return torch.cat([x.detach().flatten(), mean.detach().flatten()])
