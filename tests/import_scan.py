"""Reads imports out of sources, and runs imports in a process where almost nothing may be imported."""

import ast
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Row:
    """What the modules of one row may import, beyond the standard library, `paged.common` and each other.

    - `modules`: dotted prefixes of the modules it speaks of; the longest prefix of any row decides.
    - `may`: dotted prefixes allowed anywhere; `lazily`: allowed inside functions only.
    """

    modules: tuple[str, ...]
    may: tuple[str, ...] = ()
    lazily: tuple[str, ...] = ()
    common: bool = True


@dataclasses.dataclass(frozen=True)
class Import:
    """`target` is the full dotted name; `lazy` says that it stands inside a function."""

    target: str
    line: int
    lazy: bool


def under(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(root: Path, packages: Iterable[str]) -> dict[str, Path]:
    """Dotted name -> file of every module of the packages."""
    return {module_name(root, path): path for name in packages for path in sorted((root / name).rglob("*.py"))}


class _Reader(ast.NodeVisitor):
    def __init__(self, module: str, is_package: bool, known: Iterable[str]):
        self.package = module if is_package else module.rpartition(".")[0]
        self.known = set(known)
        self.imports: list[Import] = []
        self.unreadable: list[int] = []
        self.depth = 0

    def _add(self, target: str, node: ast.AST) -> None:
        self.imports.append(Import(target, node.lineno, self.depth > 0))  # type: ignore[attr-defined]

    def visit_FunctionDef(self, node: ast.AST) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        """What `if TYPE_CHECKING:` guards is never run."""
        name = node.test.attr if isinstance(node.test, ast.Attribute) else getattr(node.test, "id", None)
        if name == "TYPE_CHECKING":
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
        for alias in node.names:  # a name of a package may be a module of it
            inner = f"{base}.{alias.name}"
            self._add(inner if inner in self.known else base, node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                self._add(first.value, node)
            else:
                self.unreadable.append(node.lineno)
        self.generic_visit(node)


def read(path: Path, module: str, known: Iterable[str]) -> tuple[list[Import], list[int]]:
    """Every import of a file, and the lines whose import cannot be read because the name is computed."""
    reader = _Reader(module, path.name == "__init__.py", known)
    reader.visit(ast.parse(path.read_text()))
    return reader.imports, reader.unreadable


def row_of(module: str, rows: Mapping[str, Row]) -> str | None:
    fitting = [(len(prefix), name) for name, row in rows.items() for prefix in row.modules if under(module, [prefix])]
    return max(fitting)[1] if fitting else None


def broken_rules(
    root: Path, packages: tuple[str, ...], rows: Mapping[str, Row], dynamic: Iterable[str] = ()
) -> Iterator[str]:
    """One line for each import that its row does not allow, and for each module without a row."""
    modules = sources(root, packages)
    for module, path in modules.items():
        name = row_of(module, rows)
        if name is None:
            yield f"{module} has no row in the import table; give it one."
            continue
        row = rows[name]
        imports, unreadable = read(path, module, modules)
        if module not in dynamic:
            yield from (f"{module}:{line} imports a computed name." for line in unreadable)
        for found in imports:
            inside = under(found.target, packages)
            if found.target.split(".")[0] in sys.stdlib_module_names:
                continue
            if inside and row_of(found.target, rows) == name:
                continue
            if row.common and under(found.target, ["paged.common"]):
                continue
            if under(found.target, row.may) or (found.lazy and under(found.target, row.lazily)):
                continue
            where = " at module level" if under(found.target, row.lazily) else ""
            yield f"{module}:{found.line} imports {found.target}{where}, which the row {name!r} does not allow."


FORBIDDEN_MODULES = (
    "torch",
    "transformers",
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
)


def forbidden_uses(root: Path, packages: tuple[str, ...]) -> Iterator[str]:
    """One line for each pickle, torch, transformers, eval, exec or `allow_pickle` (requirements X3, E6)."""
    modules = sources(root, packages)
    for module, path in modules.items():
        for found in read(path, module, modules)[0]:
            if under(found.target, FORBIDDEN_MODULES):
                yield f"{module}:{found.line} imports {found.target}."
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and node.id in ("eval", "exec"):
                yield f"{module}:{node.lineno} names {node.id}."
            if isinstance(node, ast.Attribute) and node.attr in ("eval", "exec") and _is_builtins(node.value):
                yield f"{module}:{node.lineno} names {node.attr}."
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not _is_false(node.value):
                yield f"{module}:{node.value.lineno} allows pickle."


def _is_builtins(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("builtins", "__builtins__")


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


ALLOW_ONLY = """
import importlib, sys
allowed = set(sys.argv[1].split(",")) | set(sys.stdlib_module_names)
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ImportError(f"{name} is blocked here")
before = set(sys.modules)
sys.meta_path.insert(0, Block())
for name in sys.argv[2:]:
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    if attribute:
        getattr(loaded, attribute)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""


def import_alone(root: Path, modules: Iterable[str], allowed: Iterable[str]) -> subprocess.CompletedProcess:
    """Import modules, or `module:attribute`, where beyond the standard library only `allowed` can be imported.

    Prints the top-level names of what was loaded beyond the standard library.
    """
    command = [sys.executable, "-P", "-c", ALLOW_ONLY, ",".join(allowed), *modules]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
