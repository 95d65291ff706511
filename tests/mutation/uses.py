"""Which variants a function of the source is part of: who mentions it, and who mentions these, by their imports."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Variant = tuple[str, str]  # family, and the file in its folder, without its suffix
_Place = tuple[Path, str]  # a file, and what is defined at its top


class Uses:
    """Who mentions whom, over all kernels of a tree."""

    def __init__(self, root: Path) -> None:
        self._trees = {
            path.relative_to(root): ast.parse(path.read_text())
            for path in (*root.glob("iris_core/**/*.py"), *root.glob("kernels/**/*.py"))
        }
        self._imports = {path: dict(self._imported(path, tree)) for path, tree in self._trees.items()}
        self._users: dict[_Place, set[_Place]] = defaultdict(set)
        for path, tree in self._trees.items():
            for name, top in _tops(tree):
                for mentioned in self._mentioned(path, top):
                    self._users[mentioned].add((path, name))

    def variants(self, path: str, function: str) -> list[Variant]:
        """Return the variants that use a function, or a method of a class that they use."""
        file = Path(path)
        reached = {(file, name) for name, top in _tops(self._trees[file]) if function in _names(top)}
        new = list(reached)
        while new:
            users = self._users[new.pop()] - reached
            reached |= users
            new += users
        files = {path.with_suffix("").parts for path, _ in reached if path.parts[0] == "kernels"}
        return sorted((family, "/".join(rest)) for _, family, *rest in files if family != "common")

    def _imported(self, path: Path, tree: ast.Module) -> Iterator[tuple[str, _Place]]:
        """Give the names that a file imports from ours, and where they are: in a file, or, with no name, a file."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                folder = path.parents[node.level - 1] if node.level else Path()
                parts = (node.module or "").replace("iris_kernels", "kernels").split(".") if node.module else []
                module = folder.joinpath(*parts)
                for alias in node.names:
                    name = alias.asname or alias.name
                    for file, what in (
                        (module / f"{alias.name}.py", ""),
                        (module.with_suffix(".py"), alias.name),
                        (module / "__init__.py", alias.name),
                    ):
                        if file in self._trees:
                            yield name, (file, what)
                            break

    def _mentioned(self, path: Path, top: ast.AST) -> Iterator[_Place]:
        own = {name for name, _ in _tops(self._trees[path])}
        for node in ast.walk(top):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                file, what = self._imports[path].get(node.value.id, (path, node.value.id))
                if not what:
                    yield self._resolved((file, node.attr))
            elif isinstance(node, ast.Name):
                if node.id in self._imports[path]:
                    yield self._resolved(self._imports[path][node.id])
                elif node.id in own:
                    yield path, node.id

    def _resolved(self, place: _Place) -> _Place:
        """Return where a name is defined that a file may have imported only to hand it on."""
        file, name = place
        handed_on = self._imports[file].get(name)
        return self._resolved(handed_on) if handed_on and handed_on != place else place


def _tops(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Give the functions, classes and values that a file defines, by name."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))


def _names(top: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(top) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
