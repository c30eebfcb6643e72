"""A graph larger than a GPU: are results in bands right there, and how fast do rows come?

    python -m tests.offload_run

pytest does not collect this file. Every figure is one line of JSON on standard output. First layers and
a model, which trains, are compared with the whole graph on the CPU (``--no-checks`` leaves that
out). Then two layers of SAGEConv over a random graph in pinned memory, 25 M nodes, 128 features and
400 M edges, are timed: by default with rows that fit the GPU fetched once, and with bands that each
fetch their own. ``share_of_link``: the bytes that came, by the time, over the rate of a pinned
copy; ``share_of_both_ways``: the bytes of both directions, over the rate of copies that run both
ways at once; ``stayed_gb``: results that were still on the device, so that they did not have to come, and
``share_with_stayed`` counts them as well. ``--again`` times each limit also with results that come
again. 111 M nodes and 1.6 G edges take 214 GiB of the host's memory. In less than a minute, and
15 GiB:

    python -m tests.offload_run --nodes 4000000 --edges 60000000 --no-checks

The exit status is 1 where a difference is above ``--tolerance``. Without a GPU bands are computed
by the CPU, for small numbers of nodes.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gnnaccel
from gnnaccel.cuda.runtime.pinned import lasting
from gnnaccel.dispatch.offload.near import Near
from tests.offload import checks

#: rows that are computed by themselves, to be compared
_SAMPLE = 200
_CHUNK = 1 << 25


def say(**figure: Any) -> None:
    print(json.dumps(figure), flush=True)


class Net(nn.Module):
    """Two layers of SAGEConv."""

    def __init__(self, width: int):
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.first, self.second = SAGEConv(width, width), SAGEConv(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def check(device: str) -> float:
    """The largest difference of layers' and a model's results and gradients."""
    worst = 0.0
    for limit, pinned, enabled, names in ((4000, True, False, ()), (4000, True, True, checks.FEW),
                                          (20_000, False, False, checks.FEW)):
        pinned = pinned and device == "cuda"
        with gnnaccel.enabled() if enabled else contextlib.nullcontext():
            found = dict(checks.layers(device, limit, pinned, names))
        name = max(found, key=found.__getitem__)
        say(check="layers", count=len(found), limit=limit, pinned=pinned, enabled=enabled,
            worst=name, difference=found[name])
        worst = max(worst, found[name])
    right = checks.trained("cpu", 200, 6, 1500)
    with checks.small_bands(), gnnaccel.offload(20_000, device=device):
        found = checks.trained(device, 200, 6, 1500)
    apart = max(map(checks.difference, found, right))
    say(check="a model trains", difference=apart)
    return max(worst, apart)


def link(device: torch.device) -> dict[str, float]:
    """GB/s of pinned copies of 1 GiB to the device, and back, and of both at once, added up."""
    size, rounds = 1 << 30, 5
    far = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    close = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    there, back = (close[0], far[0]), (far[1], close[1])
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    rates = {}
    for way, copies in {"to_device": [there], "to_host": [back], "both": [there, back]}.items():
        for round_ in range(rounds + 1):
            if round_ == 1:
                torch.cuda.synchronize()
                began = time.perf_counter()
            for (to, of), stream in zip(copies, streams):
                with torch.cuda.stream(stream):
                    to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        rates[way] = rounds * size * len(copies) / (time.perf_counter() - began) / 1e9
    return rates


def made(nodes: int, edges: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features and random edges in the host's memory, pinned where the device is a GPU."""
    def empty(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return (lasting if device.type == "cuda" else torch.empty)(shape, dtype=dtype)

    x = empty((nodes, width), torch.float32)
    for rows in x.split(1 << 20):
        rows.copy_(torch.randn(rows.shape, device=device))
    edge_index = empty((2, edges), torch.long)
    for ends in edge_index:
        for part in ends.split(_CHUNK):
            part.copy_(torch.randint(0, nodes, part.shape, device=device))
    return x, edge_index


def sampled(model: Net, x: Tensor, edge_index: Tensor, limit: int | str) -> float:
    """How far the first layer's first rows are from the layer over their edges alone."""
    mine = torch.cat([at + (part < _SAMPLE).nonzero().view(-1)
                      for at, part in zip(range(0, edge_index.shape[1], _CHUNK),
                                          edge_index[1].split(_CHUNK))])
    sources, place = edge_index[0, mine].unique(return_inverse=True)
    layer = type(model.first)(x.shape[1], model.first.out_channels).double()
    layer.load_state_dict({key: value.cpu() for key, value in model.first.state_dict().items()})
    with torch.no_grad():
        right = layer((x[sources].double(), x[:_SAMPLE].double()),
                      torch.stack([place, edge_index[1, mine]]))
        with gnnaccel.offload(limit, device=next(model.parameters()).device):
            found = model.first(x, edge_index)
    return checks.difference(found[:_SAMPLE], right)


def measure(model: Net, x: Tensor, edge_index: Tensor, limit: int | str,
            rates: dict[str, float], stay: bool) -> None:
    device = next(model.parameters()).device
    rate = rates["to_device"]
    with gnnaccel.offload(limit, device=device) as ran, torch.no_grad():
        for run in ("first", "second", "third"):
            memory = ran.memory
            before = memory.fetched, memory.stored, memory.stayed
            if rate:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            out = model(x, edge_index)
            seconds = time.perf_counter() - began
            del out
            fetched, stored, stayed = (
                (now - then) / 1e9 for now, then in
                zip((memory.fetched, memory.stored, memory.stayed), before))
            say(measure=run, limit=limit, results="stay" if stay else "come again",
                seconds=round(seconds, 3), bands=sorted({bands for _, bands in ran.ran}),
                fetched_gb=fetched, stored_gb=stored, stayed_gb=stayed,
                gb_per_s=fetched / seconds, both_ways_gb_per_s=(fetched + stored) / seconds,
                share_of_link=round(fetched / seconds / rate, 3) if rate else None,
                share_of_both_ways=round((fetched + stored) / seconds / rates["both"], 3)
                if rate else None,
                share_with_stayed=round((fetched + stayed) / seconds / rate, 3) if rate else None,
                peak_gb=torch.cuda.max_memory_allocated() / 1e9 if rate else None)


@contextlib.contextmanager
def coming_again() -> Iterator[None]:
    """A block in which results do not stay on the device."""
    held = Near.leaves
    Near.leaves = lambda self, shape, dtype: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Near.leaves = held  # type: ignore[method-assign]


def train(model: Net, x: Tensor, edge_index: Tensor, limit: int | str) -> None:
    """Times steps of training, of which the loss is over a sample of the rows."""
    device = next(model.parameters()).device
    weights = torch.linspace(-1, 1, _SAMPLE * x.shape[1]).view(_SAMPLE, -1)
    with gnnaccel.offload(limit, device=device) as ran:
        for step in ("first", "second"):
            began = time.perf_counter()
            model.zero_grad()
            (model(x, edge_index)[:_SAMPLE] * weights).sum().backward()
            say(train=step, limit=limit, seconds=round(time.perf_counter() - began, 3),
                ran=str(ran))


def options(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=25_000_000)
    parser.add_argument("--edges", type=int, default=400_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--limit", type=lambda text: text if text == "auto" else int(text),
                        action="append", help="bytes, or auto; may be given several "
                        "times; default: auto, and 1.5 times the rows' bytes, of which too little is "
                        "for rows that all bands need")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--train", action="store_true", help="also time steps of training, which "
                        "take twice the host's memory")
    parser.add_argument("--again", action="store_true", help="each limit also with results that do "
                        "not stay on the device, and come again")
    parser.add_argument("--native", action="store_true", help="without gnnaccel's layers")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    asked = options(given)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    worst = 0.0 if asked.no_checks else check(device.type)
    rates = link(device) if device.type == "cuda" else {"to_device": 0.0, "both": 0.0}
    began = time.perf_counter()
    x, edge_index = made(asked.nodes, asked.edges, asked.width, device)
    say(device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        torch=torch.__version__, link_gb_per_s=rates, nodes=asked.nodes, edges=asked.edges,
        width=asked.width, made_s=round(time.perf_counter() - began, 1))
    torch.manual_seed(0)
    model = Net(asked.width).to(device).eval()
    limits = asked.limit or ["auto", 3 * x.numel() * x.element_size() // 2]
    with contextlib.nullcontext() if asked.native else gnnaccel.enabled():
        began = time.perf_counter()
        apart = sampled(model, x, edge_index, limits[0])
        say(check=f"{_SAMPLE} rows of the first layer", difference=apart,
            seconds_with_bands_made=round(time.perf_counter() - began, 3))
        for limit in limits:
            measure(model, x, edge_index, limit, rates, True)
            if asked.again:
                with coming_again():
                    measure(model, x, edge_index, limit, rates, False)
        if asked.train:
            train(model, x, edge_index, limits[0])
    return int(max(worst, apart) > asked.tolerance)


if __name__ == "__main__":
    sys.exit(main())
