"""Check the sizes of the code: lines of a file, lines of a function, parameters of a function.

A docstring counts for the file, not for its function. `self` and `cls` are not parameters. Triton kernels
(`@triton.jit`) are exempt from the parameter limit: a kernel's signature is its pointers, shapes and strides.
A part that outgrows its size often lacks an object: look for it first. Other cases go into EXCEPTIONS, with the reason.
An exception that nothing needs any more is an error too.

Usage: python tools/check_sizes.py [ROOT]
"""

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["file lines", "function lines", "parameters"]

LIMITS: dict[Kind, int] = {"file lines": 400, "function lines": 60, "parameters": 8}

# Folders of the root that hold no code of ours, and those where only the size of a file is checked.
SKIPPED_FOLDERS = {"build", "dist", "docs"}
FILES_ONLY_FOLDERS = {"tests"}


@dataclass(frozen=True)
class Allowance:
    """Larger limit for one place, and the reason."""

    limit: int
    reason: str


# (kind, "path/from/root.py" or "path/from/root.py::Class.function") -> Allowance
EXCEPTIONS: dict[tuple[Kind, str], Allowance] = {}


class Size(NamedTuple):
    """One measured size."""

    kind: Kind
    place: str  # as in EXCEPTIONS
    line: int
    value: int


Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)


def measure(source: str, path: str, files_only: bool = False) -> Iterator[Size]:
    """Sizes in one file; `path` is used for naming only."""
    yield Size("file lines", path, 1, len(source.splitlines()))
    if not files_only:
        yield from _measure_functions(ast.parse(source, path), path, owners=())


def _measure_functions(node: ast.AST, path: str, owners: tuple[str, ...]) -> Iterator[Size]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTION_NODES):
            place = f"{path}::{'.'.join((*owners, child.name))}"
            yield Size("function lines", place, child.lineno, _count_lines(child))
            if not _is_triton_kernel(child):
                yield Size("parameters", place, child.lineno, _count_parameters(child, isinstance(node, ast.ClassDef)))
        inner = (*owners, child.name) if isinstance(child, (ast.ClassDef, *FUNCTION_NODES)) else owners
        yield from _measure_functions(child, path, inner)


def _count_lines(function: Function) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def _count_parameters(function: Function, in_class: bool) -> int:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if in_class and positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    return len(positional) + len(arguments.kwonlyargs) + sum(a is not None for a in (arguments.vararg, arguments.kwarg))


def _is_triton_kernel(function: Function) -> bool:
    names = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(ast.unparse(name) == "triton.jit" for name in names)


def source_files(root: Path) -> Iterator[str]:
    """Paths from `root` of its Python files, sorted, without those in hidden and skipped folders."""
    for folder, subfolders, files in os.walk(root):
        skipped = SKIPPED_FOLDERS if Path(folder) == root else set()
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in skipped)
        for name in sorted(files):
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def check(root: Path, exceptions: dict[tuple[Kind, str], Allowance]) -> list[str]:
    """Complaints about the tree at `root`, one line each; empty when all sizes are within the limits."""
    complaints = []
    needed = set()
    for path in source_files(root):
        files_only = path.split("/")[0] in FILES_ONLY_FOLDERS
        for size in measure((root / path).read_text(encoding="utf-8"), path, files_only):
            limit = LIMITS[size.kind]
            if size.value <= limit:
                continue
            key = (size.kind, size.place)
            if key in exceptions:
                needed.add(key)
                limit = exceptions[key].limit
            if size.value > limit:
                name = size.place.partition("::")[2]
                what = f"{name}: " if name else ""
                complaints.append(f"{path}:{size.line}: {what}{size.value} {size.kind}, at most {limit}")
    for kind, place in sorted(exceptions.keys() - needed):
        complaints.append(f"tools/check_sizes.py: the exception ({kind!r}, {place!r}) is no longer needed")
    return complaints


def main(arguments: list[str]) -> int:
    """Check the tree at the given root, or at this repository's; returns the exit status."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    complaints = check(root, EXCEPTIONS)
    print("\n".join(complaints) or "Sizes: all within limits")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
