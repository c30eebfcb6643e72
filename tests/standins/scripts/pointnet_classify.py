"""Point clouds classified by two set abstractions written over torch_cluster and torch_scatter."""
import torch
from torch import nn
from torch_cluster import fps, radius
from torch_scatter import scatter_max

B, POINTS = 3, 40
torch.manual_seed(0)
pos, batch = torch.rand(B * POINTS, 3).double(), torch.arange(B).repeat_interleave(POINTS)
y = torch.tensor([0, 1, 0])
first, second = nn.Linear(3, 8).double(), nn.Linear(11, 8).double()
head = nn.Linear(8, 2).double()


def abstracted(x, pos, batch, lin, ratio, r):
    idx = fps(pos, batch, ratio=ratio, random_start=False)
    row, col = radius(pos, pos[idx], r, batch, batch[idx], max_num_neighbors=POINTS)
    apart = pos[col] - pos[idx][row]
    messages = lin(apart if x is None else torch.cat([x[col], apart], -1)).relu()
    return scatter_max(messages, row, dim=0, dim_size=len(idx))[0], pos[idx], batch[idx]


def finished(x, batch, pool):
    for lin in (first, second, head):
        lin.zero_grad()
    out = head(pool(x, batch))
    nn.functional.cross_entropy(out, y).backward()
    return torch.cat([out.detach().flatten(), first.weight.grad.flatten(),
                      second.weight.grad.flatten()])


level = abstracted(None, pos, batch, first, 0.5, 0.35)
x, _, of = abstracted(*level, second, 0.25, 0.6)
result = finished(x, of, lambda x, batch: scatter_max(x, batch, dim=0)[0])


def native():
    def by_hand(x, pos, batch, lin, ratio, r):
        rows, kept = [], []
        for b in range(B):
            inside = (batch == b).nonzero().squeeze(1)
            points, picks = pos[inside], [0]
            while len(picks) < ratio * len(points):
                apart = (points[:, None] - points[picks]).square().sum(-1)
                picks.append(int(apart.amin(1).argmax()))
            kept += inside[picks].tolist()
        for centre in kept:
            near = ((pos - pos[centre]).square().sum(-1) <= r * r) & (batch == batch[centre])
            apart = pos[near] - pos[centre]
            rows.append(lin(apart if x is None else torch.cat([x[near], apart], -1)).relu()
                        .amax(0))
        return torch.stack(rows), pos[kept], batch[kept]

    level = by_hand(None, pos, batch, first, 0.5, 0.35)
    x, _, of = by_hand(*level, second, 0.25, 0.6)
    return finished(x, of, lambda x, batch: torch.stack([x[batch == b].amax(0) for b in range(B)]))
