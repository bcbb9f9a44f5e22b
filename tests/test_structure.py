"""No import circle, and no object reads another's underscore names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("bagua", "lightning_bagua")
# Attributes of torch's process groups and modules and of a Redis connection, which objects of ours have too.
OTHERS = {
    "_timeout",
    "_sock",
    "_buffers",
    "_reduce_scatter_base",
    "_allgather_base",
    "_start_coalescing",
    "_end_coalescing",
}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages, by its dotted name."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the packages that a module imports at its top level, under TYPE_CHECKING too.

    An import within a function or a lazy attribute of a package runs later, and makes no circle.
    """
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in top_level(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            found.update(f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names)
    return {other for other in found if other in known and other != name}


def top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run, or are read by type checkers, at import."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield node
            yield from top_level(node)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component: list[str] = []
            while not component or component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def test_no_import_circle() -> None:
    known = modules()
    edges = {name: imported(name, path, known) for name, path in known.items()}
    # A package's __init__ re-exports what is in it: that is no circle between modules that hold code.
    bodies = {name: {o for o in others if known[o].name != "__init__.py"} for name, others in edges.items()}
    assert not circles(bodies)


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def underscore_names(tree: ast.AST) -> set[str]:
    """Names with one leading underscore that a module defines: of its own, its classes and its objects."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def is_self(node: ast.AST) -> bool:
    """Whether an expression is the object or class itself."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return True
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_object_reads_anothers_underscore_names() -> None:
    """Names that no module of ours defines are torch's or others', whose private names are sometimes all there is."""
    trees = {path: parsed(path) for path in modules().values()}
    own = {path: underscore_names(tree) for path, tree in trees.items()}
    everyones = set().union(*own.values())
    wrong: list[str] = []
    for path, tree in trees.items():
        private = everyones - own[path] - OTHERS
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in private and not is_self(node.value):
                root = node.value
                while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                    root = root.func if isinstance(root, ast.Call) else root.value
                if not (isinstance(root, ast.Name) and root.id in ("torch", "dist", "os", "sys")):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                if (node.module or "").startswith("bagua.torch_api"):
                    continue  # the original's own names, `_get_default_group` for one
                wrong += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: imports {alias.name}"
                    for alias in node.names
                    if alias.name.startswith("_") and not alias.name.startswith("__")
                ]
    assert not wrong, "\n".join(wrong)


def test_no_timed_get_of_a_simple_queue() -> None:
    """It never ends in the main thread if a signal handler outlasts it: CPython then waits without a limit."""
    for path in modules().values():
        text = path.read_text()
        assert "SimpleQueue" not in text or ".get(timeout" not in text, path
