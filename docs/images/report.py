"""Draws the pictures of a report's page in this folder with a headless browser of the Chromium family: its upper part light and
dark, narrow and wide, and its charts.

    PYTHONPATH=. python docs/images/report.py             # needs torch_geometric, Pillow, and a browser on the PATH
    PYTHONPATH=. python docs/images/report.py --keep report.html

The page is that of a small model over the code graph of a part of the installed packages (examples/code_graph.py), trained for
some epochs and compared with the host's own layers. Fonts are the system's: DejaVu or Liberation where there are no others.
"""
from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = 900  # sources in the graph: seconds, not minutes
WIDTHS = {"narrow": 400, "wide": 1400}  # CSS pixels
HEADINGS = "[...document.querySelectorAll('h2')].map(e => [e.textContent, e.getBoundingClientRect().top])"


def train(epochs: int = 6) -> None:
    """What is reported: four layers taken over in one way or another, and one that stays native."""
    import torch
    from torch_geometric.nn import GATConv, GCNConv, RGCNConv

    sys.path.insert(0, str(ROOT / "examples"))
    import code_graph

    graph = code_graph.build(code_graph.all_sources(FILES))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, edges, kinds, y = (torch.as_tensor(part).to(device) for part in (graph.x, graph.edge_index, graph.edge_type, graph.y))
    edges, kinds = torch.cat([edges, edges.flip(0)], 1), torch.cat([kinds.long(), kinds.long() + 4])
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = RGCNConv(x.shape[1], 64, 8)
            self.relate = RGCNConv(64, 64, 8, num_bases=4)
            self.smooth = GCNConv(64, 64)
            self.mean = GATConv(64, 8, 8, aggr="mean")
            self.attend = GATConv(64, 16, 8)
            self.classify = torch.nn.Linear(128, len(graph.classes))

        def forward(self):
            h = self.relate(self.embed(x.float(), edges, kinds).relu(), edges, kinds).relu()
            return self.classify(self.attend(self.mean(self.smooth(h, edges).relu(), edges).relu(), edges).relu())

    import gnnaccel

    model = Net().to(device)
    gnnaccel.name_layers(model)
    optimizer, labelled = torch.optim.Adam(model.parameters(), lr=0.01), y >= 0
    for _ in range(epochs):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model()[labelled], y[labelled]).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="only train, for what measures it")
    parser.add_argument("--keep", type=Path, metavar="HTML", help="leave the page there")
    parser.add_argument("--page", type=Path, metavar="HTML", help="draw this page, made before")
    args = parser.parse_args()
    if args.train:
        return train()
    from tests import browser

    with tempfile.TemporaryDirectory() as folder:
        page = args.page or args.keep or Path(folder) / "report.html"
        if not args.page:
            measured = ["-m", "gnnaccel", "--compare", "--report", str(page), __file__, "--train"]
            subprocess.run([sys.executable, *measured], check=True)
        binary = browser.find()
        if binary is None:
            raise SystemExit(f"no pictures: none of {', '.join(browser.NAMES)} is on the PATH")
        draw(page, binary)


def draw(page: Path, binary: str) -> None:
    from tests import browser

    with browser.Browser(binary) as tab:
        for name, width in WIDTHS.items():
            for theme in ("light", "dark"):
                tab.show(page, width, theme == "dark")
                tops = dict(tab.value(HEADINGS))
                save(f"report-{theme}-{name}", tab.picture(height=tops["Decisions"] - 24))
                if (theme, name) == ("light", "wide"):
                    top = next(at for title, at in tops.items() if title.startswith("Roofline")) - 24
                    save("report-charts", tab.picture(top))


def save(name: str, picture: bytes) -> None:
    """In 64 colours, which such pages hardly exceed."""
    from PIL import Image

    target = HERE / f"{name}.png"
    found = Image.open(io.BytesIO(picture)).convert("RGB")
    found.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(target, optimize=True)
    print(target.name, f"{target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
