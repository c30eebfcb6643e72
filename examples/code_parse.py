"""One Python source file as graph nodes and names still to be resolved. Used by code_graph.py, in
worker processes."""
from __future__ import annotations

import ast
import builtins
import re
import warnings
import zlib
from dataclasses import dataclass, field

KINDS = ("module", "class", "function")
MODULE, CLASS, FUNCTION = range(3)
FEATURES = 256
# words of a docstring that count; later ones are mostly examples and parameter lists
DOC_WORDS = 40
BUILTINS = frozenset(dir(builtins))
_PIECES = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_WORDS = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Source:
    path: str
    module: str  # dotted name
    package: str  # what the nodes of this file are labelled with
    is_package: bool  # an __init__.py


@dataclass
class Node:
    kind: int  # index into KINDS
    name: str  # dotted, from the top-level package on
    parent: int  # index of the enclosing node in its file, -1 for the module
    codes: list[int]  # signed, one-based hash codes of the feature tokens


@dataclass
class Parsed:
    """A parsed file; without nodes if it did not parse. Numbers are indices into ``nodes``, the
    module being 0."""

    module: str
    package: str
    nodes: list[Node] = field(default_factory=list)
    # name bound by an import -> dotted target
    aliases: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # modules of ``from m import *``
    imports: list[str] = field(default_factory=list)
    bases: list[tuple[int, str]] = field(default_factory=list)
    # caller, dotted target or "", last part of it
    calls: list[tuple[int, str, str]] = field(default_factory=list)


def tokens(identifier: str) -> list[str]:
    """Lower-case parts of a snake_case or camelCase identifier: ``getHTTPCode_v2`` -> get, http,
    code, v, 2."""
    return [piece.lower() for piece in _PIECES.findall(identifier)]


def hash_code(token: str) -> int:
    """Signed feature hashing: +-(1 + column). The same everywhere, unlike ``hash``."""
    value = zlib.crc32(token.encode())
    column = value % FEATURES + 1
    return column if value >> 31 else -column


def parse(job: tuple[Source, frozenset[str]]) -> Parsed:
    """Parses one file. ``job`` is the source and the tokens that must not become features."""
    source, hidden = job
    result = Parsed(source.module, source.package)
    try:
        with open(source.path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(file.read())
        visitor = _Visitor(source, hidden, result)
        visitor.enter(MODULE, source.module.rpartition(".")[2], tree, [])
        visitor.resolve_locals()
    except (SyntaxError, ValueError, RecursionError, OSError):
        return Parsed(source.module, source.package)
    return result


class _Visitor(ast.NodeVisitor):
    """Collects a file's nodes and the names that it imports, inherits from and calls."""

    def __init__(self, source: Source, hidden: frozenset[str], result: Parsed) -> None:
        self.source, self.hidden, self.result = source, hidden, result
        self.scopes: list[int] = []
        self.known: dict[str, int] = {}  # dotted name -> index

    def enter(self, kind: int, identifier: str, tree: ast.AST, arguments: list[str]) -> None:
        """Adds a node and visits its body. A second definition of the same name (an overload) joins
        the first."""
        nodes = self.result.nodes
        parent = self.scopes[-1] if self.scopes else -1
        name = f"{nodes[parent].name}.{identifier}" if self.scopes else self.source.module
        index = self.known.setdefault(name, len(nodes))
        if index == len(nodes):
            nodes.append(Node(kind, name, parent,
                              self._codes(identifier, arguments, ast.get_docstring(tree, False))))
        self.scopes.append(index)
        for statement in tree.body:
            self.visit(statement)
        self.scopes.pop()

    def _codes(self, identifier: str, arguments: list[str], doc: str | None) -> list[int]:
        words = _WORDS.findall(doc or "")[:DOC_WORDS]
        found = [token for word in [identifier, *arguments, *words]
                 if word.lower() not in self.hidden
                 for token in tokens(word)]
        return [hash_code(token) for token in found if token not in self.hidden]

    def visit_FunctionDef(self, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for outside in [*tree.decorator_list, *tree.args.defaults, *tree.args.kw_defaults]:
            if outside is not None:
                self.visit(outside)
        every = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
        names = [argument.arg for argument in every if argument.arg not in ("self", "cls")]
        self.enter(FUNCTION, tree.name, tree, names)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, tree: ast.ClassDef) -> None:
        for outside in [*tree.decorator_list, *tree.keywords]:
            self.visit(outside)
        name = f"{self.result.nodes[self.scopes[-1]].name}.{tree.name}"
        self.enter(CLASS, tree.name, tree, [])
        for base in tree.bases:
            dotted = _dotted(base.value if isinstance(base, ast.Subscript) else base)
            if dotted:
                self.result.bases.append((self.known[name], dotted))

    def visit_Call(self, tree: ast.Call) -> None:
        dotted = _dotted(tree.func)
        if dotted:
            self.result.calls.append((self.scopes[-1], dotted, dotted.rpartition(".")[2]))
        self.generic_visit(tree)

    def visit_Import(self, tree: ast.Import) -> None:
        for alias in tree.names:
            self.result.imports.append(alias.name)
            first = alias.name.partition(".")[0]
            self.result.aliases[alias.asname or first] = alias.name if alias.asname else first

    def visit_ImportFrom(self, tree: ast.ImportFrom) -> None:
        module = self._absolute(tree.module or "", tree.level)
        for alias in tree.names:
            if alias.name == "*":
                self.result.stars.append(module)
                self.result.imports.append(module)
            else:
                self.result.imports.append(f"{module}.{alias.name}")
                # A function's own imports are kept with the module's: simple, and seldom wrong.
                self.result.aliases[alias.asname or alias.name] = f"{module}.{alias.name}"

    def _absolute(self, module: str, level: int) -> str:
        if not level:
            return module
        parts = self.source.module.split(".")
        parts = parts[:len(parts) - level + (1 if self.source.is_package else 0)]
        return ".".join([*parts, module] if module else parts)

    def resolve_locals(self) -> None:
        """Replaces names by dotted ones as far as this file tells; what it does not know becomes
        ""."""
        result = self.result
        result.bases = [(node, self._target(result.nodes[node].parent, dotted))
                        for node, dotted in result.bases]
        result.bases = [(node, target) for node, target in result.bases if target]
        calls = {(node, self._target(node, dotted), "" if dotted in BUILTINS else last)
                 for node, dotted, last in result.calls}
        result.calls = sorted(call for call in calls if call[1] or call[2])

    def _target(self, scope: int, dotted: str) -> str:
        """``dotted`` as seen from the node ``scope``: enclosing scopes first (classes only for
        self), then imports."""
        nodes = self.result.nodes
        first, _, rest = dotted.partition(".")
        innermost = True
        while scope >= 0:
            node = nodes[scope]
            if node.kind == CLASS and first in ("self", "cls"):
                return f"{node.name}.{rest}" if rest and "." not in rest else ""
            # A class's names are visible in its own body only, not in its methods.
            if (node.kind != CLASS or innermost) and f"{node.name}.{first}" in self.known:
                return f"{node.name}.{dotted}"
            scope, innermost = node.parent, False
        alias = self.result.aliases.get(first)
        return "" if alias is None else f"{alias}.{rest}" if rest else alias


def _dotted(tree: ast.expr) -> str:
    """``a.b.c`` for names and attributes of names; ".c" (only the last part counts) for other
    attributes; else ""."""
    parts = []
    while isinstance(tree, ast.Attribute):
        parts.append(tree.attr)
        tree = tree.value
    if isinstance(tree, ast.Name):
        return ".".join([tree.id, *reversed(parts)])
    return f".{parts[0]}" if parts else ""
