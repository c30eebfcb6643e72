"""LightGCN for recommendation: a bipartite graph as one square SparseTensor, trained by BPR."""
import torch
import torch.nn.functional as F
from torch_sparse import SparseTensor, matmul

USERS, ITEMS = 20, 30
torch.manual_seed(0)
user, item = torch.randint(0, USERS, (150,)), torch.randint(0, ITEMS, (150,))
user, item = torch.stack([user, item]).unique(dim=1)
R = SparseTensor(row=user, col=item, sparse_sizes=(USERS, ITEMS))
row, col, _ = R.coo()
adj = SparseTensor(row=torch.cat([row, col + USERS]), col=torch.cat([col + USERS, row]),
                   value=torch.ones(2 * len(row)).double(),
                   sparse_sizes=(USERS + ITEMS, USERS + ITEMS))
deg = adj.sum(dim=1)
norm = deg.clamp(min=1).pow(-0.5)
adj = adj.mul(norm.view(-1, 1)).mul(norm.view(1, -1))


def train(propagate):
    torch.manual_seed(1)
    emb = torch.nn.Parameter(torch.randn(USERS + ITEMS, 8).double())
    opt = torch.optim.SGD([emb], lr=0.5)
    for _ in range(5):
        layers = [emb]
        for _ in range(3):
            layers.append(propagate(layers[-1]))
        final = torch.stack(layers, dim=1).mean(dim=1)
        users, items = final[:USERS], final[USERS:]
        pos = (users[row] * items[col]).sum(-1)
        neg = (users[row] * items[(col + 7) % ITEMS]).sum(-1)
        loss = -F.logsigmoid(pos - neg).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return emb.detach()


result = train(lambda x: matmul(adj, x, reduce="sum"))


def native():
    dense = torch.zeros(USERS + ITEMS, USERS + ITEMS).double()
    dense[user, item + USERS] = 1
    dense = dense + dense.t()
    d = dense.sum(1).clamp(min=1).rsqrt()
    return train(lambda x: (d[:, None] * dense * d) @ x)
