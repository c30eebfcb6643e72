"""The code graph of the running Python environment, as data for node classification.

Nodes are the modules, classes and functions of the installed packages and of the standard library.
Edges are typed: imports, defines, inherits, calls. The task is to tell which top-level package a
node belongs to. A node's features come from its own identifier, its argument names and its
docstring, never from its path, and tokens that name a package are dropped, so the label is not
written in the features.

The graph is built once with `ast` and cached. ``python examples/code_graph.py`` builds it and
prints a summary.
"""
from __future__ import annotations

import hashlib
import importlib.metadata
import multiprocessing
import os
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from code_parse import FEATURES, Parsed, Source, parse, tokens

RELATIONS = ("imports", "defines", "inherits", "calls")
STDLIB = "stdlib"
MAX_FILES = 12_000
MAX_BYTES = 1_500_000  # a source file larger than this is generated data, not code
MIN_NODES = 150  # packages with fewer nodes get no class of their own: label -1, in no split
SKIPPED_FOLDERS = {"tests", "test", "__pycache__", "site-packages", "dist-packages", "idlelib",
                   "lib2to3"}
# part of the cache's key: raise it whenever the graph built from the same sources changes
FORMAT = 1


@dataclass
class CodeGraph:
    """N nodes, E directed edges, C classes."""

    x: np.ndarray  # [N, 256] float16, rows of length one (or zero)
    y: np.ndarray  # [N] int64, class, -1 for none
    edge_index: np.ndarray  # [2, E] int64, (source, target)
    edge_type: np.ndarray  # [E] int8, index into RELATIONS
    kind: np.ndarray  # [N] int8, index into code_parse.KINDS
    train_mask: np.ndarray  # [N] bool
    val_mask: np.ndarray  # [N] bool
    test_mask: np.ndarray  # [N] bool
    classes: np.ndarray  # [C] str, names of packages
    names: np.ndarray  # [bytes] uint8, the nodes' dotted names in UTF-8, one a line
    files: np.ndarray  # [2] int64, files parsed and files skipped because they do not parse

    def node_names(self) -> list[str]:
        return self.names.tobytes().decode().split("\n")


# -- finding sources -------------------------------------------------------------------------------

def site_folders() -> list[Path]:
    """Folders that installed packages live in, in import order."""
    found = {Path(str(dist.locate_file(""))).resolve()
             for dist in importlib.metadata.distributions()}
    found.update(Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib"))
    order = [Path(entry).resolve() for entry in sys.path]
    # A checkout on sys.path also counts as a distribution's folder; only real site folders are
    # wanted.
    real = [path for path in found if path.name.endswith("-packages") and path.is_dir()]
    return sorted(real,
                  key=lambda path: (order.index(path) if path in order else len(order), str(path)))


def sources_in(folder: Path, package: str | None = None) -> list[Source]:
    """All modules below ``folder``. A module's package is its top-level name unless ``package`` is
    given."""
    found = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name.isidentifier()
                            and name not in SKIPPED_FOLDERS)
        parts = Path(where).relative_to(folder).parts
        for name in sorted(files):
            stem, suffix = os.path.splitext(name)
            path = os.path.join(where, name)
            if suffix != ".py" or not stem.isidentifier() or os.path.getsize(path) > MAX_BYTES:
                continue
            dotted = parts if stem == "__init__" else (*parts, stem)
            if dotted:
                found.append(Source(path, ".".join(dotted), package or dotted[0],
                                    stem == "__init__"))
    return found


def all_sources(max_files: int = MAX_FILES) -> list[Source]:
    """Modules of every installed package and the standard library; whole packages, the largest
    first, up to a cap."""
    packages: dict[str, list[Source]] = defaultdict(list)
    owner: dict[str, Path] = {}
    for folder in site_folders():
        for source in sources_in(folder):
            # the first folder on the path wins
            if owner.setdefault(source.package, folder) == folder:
                packages[source.package].append(source)
    packages[STDLIB] = sources_in(Path(sysconfig.get_path("stdlib")), STDLIB)
    kept, room = [], max_files
    for _, sources in sorted(packages.items(), key=lambda item: (-len(item[1]), item[0])):
        if len(sources) <= room:
            kept += sources
            room -= len(sources)
    return sorted(kept, key=lambda source: (source.package, source.module, source.path))


def package_tokens(packages: set[str]) -> frozenset[str]:
    """Tokens that give a package away: those of its name, and the name in one piece."""
    return frozenset(token for name in packages - {STDLIB}
                     for token in [*tokens(name), name.lower().strip("_")])


# -- parsing ---------------------------------------------------------------------------------------

def parse_all(sources: list[Source], progress: bool = False) -> list[Parsed]:
    """Parses with one process a core. Files that do not parse come back without nodes."""
    hidden = package_tokens({source.package for source in sources})
    jobs = [(source, hidden) for source in sources]
    if len(jobs) < 64:  # starting processes would take longer
        return [parse(job) for job in jobs]
    # A forked worker does not import the caller's script (and with it torch) anew.
    method = "fork" if sys.platform == "linux" else None
    with multiprocessing.get_context(method).Pool(os.cpu_count()) as pool:
        results = pool.imap(parse, jobs, chunksize=16)
        return list(_with_bar(results, len(jobs)) if progress else results)


def _with_bar(results, total: int):
    from rich.progress import track

    return track(results, "reading the installed packages", total=total, transient=True)


# -- resolving names -------------------------------------------------------------------------------

class Resolver:
    """Turns dotted names into node numbers."""

    def __init__(self, files: list[Parsed], numbers: dict[str, int]) -> None:
        self.numbers = numbers
        self.aliases = {file.module: file.aliases for file in files}
        self.stars = {file.module: file.stars for file in files if file.stars}
        last = Counter(name.rpartition(".")[2] for name in numbers if name not in self.aliases)
        self.unique = {name.rpartition(".")[2]: number for name, number in numbers.items()
                       if name not in self.aliases and last[name.rpartition(".")[2]] == 1}
        self.bases: dict[int, list[int]] = defaultdict(list)
        self.methods = {number: name for name, number in numbers.items()}

    def lookup(self, target: str, hops: int = 8) -> int | None:
        """The node called ``target``, through at most ``hops`` re-exports (``from .a import b`` in
        an __init__)."""
        for _ in range(hops):
            if target in self.numbers:
                return self.numbers[target]
            module = target
            while module and module not in self.aliases:
                module = module.rpartition(".")[0]
            if not module:
                return None
            first, _, rest = target[len(module) + 1:].partition(".")
            alias = self.aliases[module].get(first)
            if alias is None:
                stars = (f"{star}.{target[len(module) + 1:]}"
                         for star in self.stars.get(module, ()))
                return next((self.numbers[name] for name in stars if name in self.numbers), None)
            target = f"{alias}.{rest}" if rest else alias
        return None

    def imported(self, target: str) -> int | None:
        """What an import statement names, or the module it is taken from."""
        found = self.lookup(target)
        return self.lookup(target.rpartition(".")[0]) if found is None else found

    def method(self, target: str) -> int | None:
        """A method called on ``self``: ``target`` is module.Class.name; base classes are searched
        breadth first."""
        owner, _, name = target.rpartition(".")
        queue, seen = [self.numbers.get(owner)], set()
        while queue:
            here = queue.pop(0)
            if here is None or here in seen:
                continue
            seen.add(here)
            found = self.numbers.get(f"{self.methods[here]}.{name}")
            if found is not None:
                return found
            queue += self.bases[here]
        return None

    def called(self, target: str, last: str) -> int | None:
        """The callee: by its resolved name, as a method of ``self``, or by a name that exists only
        once."""
        found = None
        if target:
            found = self.lookup(target)
            found = self.method(target) if found is None else found
        return self.unique.get(last) if found is None else found


# -- building --------------------------------------------------------------------------------------

def build(sources: list[Source], min_nodes: int = MIN_NODES, progress: bool = False) -> CodeGraph:
    """The graph of ``sources``. The same sources give the same graph."""
    parsed = parse_all(sources, progress)
    files = list({file.module: file for file in parsed if file.nodes}.values())
    numbers: dict[str, int] = {}
    for file in files:
        for node in file.nodes:
            numbers.setdefault(node.name, len(numbers))
    nodes = {node.name: (node, file.package) for file in reversed(files)
             for node in reversed(file.nodes)}
    ordered = [nodes[name] for name in numbers]
    edges = _edges(files, numbers)
    y, classes = _labels([package for _, package in ordered], min_nodes)
    train, val, test = split(y)
    return CodeGraph(
        x=_features([node.codes for node, _ in ordered]), y=y,
        edge_index=np.ascontiguousarray(edges[:, :2].T), edge_type=edges[:, 2].astype(np.int8),
        kind=np.array([node.kind for node, _ in ordered], np.int8),
        train_mask=train, val_mask=val, test_mask=test, classes=classes,
        names=np.frombuffer("\n".join(numbers).encode(), np.uint8),
        files=np.array([sum(bool(file.nodes) for file in parsed),
                        sum(not file.nodes for file in parsed)]),
    )


def _edges(files: list[Parsed], numbers: dict[str, int]) -> np.ndarray:
    """[E, 3] int64: source, target, relation; sorted, each once, without self-loops."""
    resolver = Resolver(files, numbers)
    found: list[tuple[int, int | None, int]] = []
    for file in files:
        here = [numbers[node.name] for node in file.nodes]
        found += [(here[0], resolver.imported(target), 0) for target in file.imports]
        found += [(here[node.parent], here[i], 1) for i, node in enumerate(file.nodes)
                  if node.parent >= 0]
        inherits = [(here[node], resolver.lookup(target), 2) for node, target in file.bases]
        for child, base, _ in inherits:
            if base is not None:
                resolver.bases[child].append(base)
        found += inherits
    for file in files:  # after all base classes are known
        for node, target, last in file.calls:
            found.append((numbers[file.nodes[node].name], resolver.called(target, last), 3))
    kept = [edge for edge in found if edge[1] is not None and edge[0] != edge[1]]
    return np.unique(np.array(kept, np.int64).reshape(-1, 3), axis=0)


def _features(codes: list[list[int]]) -> np.ndarray:
    """[N, FEATURES] float16 from signed, one-based hash codes; rows are scaled to length one."""
    x = np.zeros((len(codes), FEATURES), np.float32)
    rows = np.repeat(np.arange(len(codes)), [len(row) for row in codes])
    flat = np.array([code for row in codes for code in row], np.int64)
    np.add.at(x, (rows, np.abs(flat) - 1), np.sign(flat))
    return (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-6)).astype(np.float16)


def _labels(packages: list[str], min_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes are the packages with at least ``min_nodes`` nodes, the largest first. Returns (y
    [N], names [C])."""
    counts = Counter(packages)
    classes = sorted((name for name in counts if counts[name] >= min_nodes),
                     key=lambda name: (-counts[name], name))
    number = {name: index for index, name in enumerate(classes)}
    return np.array([number.get(name, -1) for name in packages],
                    np.int64), np.array(classes, dtype=str)


def split(y: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Masks [N] bool for training, validation and test: 60, 20 and 20 percent of the labelled
    nodes."""
    labelled = np.random.default_rng(seed).permutation(np.flatnonzero(y >= 0))
    ends = [round(0.6 * len(labelled)), round(0.8 * len(labelled))]
    masks = np.zeros((3, len(y)), bool)
    for mask, part in zip(masks, np.split(labelled, ends)):
        mask[part] = True
    return masks[0], masks[1], masks[2]


# -- the cache -------------------------------------------------------------------------------------

def fingerprint(max_files: int) -> str:
    """16 hex digits that change with the installed distributions, Python's version and this
    module's limits."""
    installed = sorted({f"{dist.metadata['Name']}=={dist.version}"
                        for dist in importlib.metadata.distributions()})
    limits = (FORMAT, sys.version_info[:3], max_files, MAX_BYTES, MIN_NODES, FEATURES)
    return hashlib.sha256("\n".join([*installed, repr(limits)]).encode()).hexdigest()[:16]


def save(graph: CodeGraph, path: Path) -> None:
    """Written beside its place and moved there, so a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
        np.savez_compressed(file,
                            **{field.name: getattr(graph, field.name) for field in fields(graph)})
    os.replace(file.name, path)


def read(path: Path) -> CodeGraph:
    with np.load(path) as data:
        return CodeGraph(**{field.name: data[field.name] for field in fields(CodeGraph)})


def load(max_files: int = MAX_FILES, progress: bool = True) -> CodeGraph:
    """The graph of this environment, from the cache if it was built before."""
    import platformdirs

    path = Path(
        platformdirs.user_cache_dir("gnnaccel")) / f"code_graph-{fingerprint(max_files)}.npz"
    if not path.exists():
        save(build(all_sources(max_files), progress=progress), path)
    return read(path)


def summary(graph: CodeGraph) -> str:
    """One line for people."""
    degree = np.bincount(graph.edge_index[1], minlength=len(graph.y))
    counts = np.bincount(graph.edge_type, minlength=len(RELATIONS))
    relations = ", ".join(f"{count:,} {name}" for count, name in zip(counts, RELATIONS))
    return (f"{graph.files[0]:,} files ({graph.files[1]} did not parse): {len(graph.y):,} nodes, "
            f"{len(graph.edge_type):,} edges ({relations}), {len(graph.classes)} "
            "packages as classes; "
            f"largest in-degree {degree.max(initial=0):,} "
            f"({graph.node_names()[int(degree.argmax())]})")


if __name__ == "__main__":
    print(summary(load()))
