"""Check that tests write only attributes that exist: one that was renamed is set to no effect, and the test cannot fail.

An attribute that a test writes (`a.b.name = 1`, `setattr(a, "name", 1)`) must be defined somewhere: in the body of a
class, on `self`, in `__slots__`, at the top of a module, or in a `SimpleNamespace`. A private one must be defined in
the package, not in the tests. `setattr(..., raising=False)` of pytest's monkeypatch is an error: it would make the
attribute. Attributes of other libraries' objects stand in EXTERNAL; one that no test writes any more is an error too.

The names of all classes are one set: that an attribute belongs to another class is not seen.

Usage: python tools/check_test_writes.py [ROOT]
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE_FOLDERS = ("kernels", "lora", "models", "platform", "spec_decode")
TEST_FOLDERS = ("tests", "benchmarks", "tools")
"""Folders whose classes tests write, too."""
EXTERNAL: dict[str, str] = {
    "__cause__": "an exception",
    "__dict__": "an object",
    "architectures": "transformers' configuration",
    "eos_token": "a tokenizer of transformers",
    "eos_token_id": "transformers' generation config",
    "exitstatus": "pytest's session",
    "get_added_vocab": "a tokenizer of transformers",
    "init_lora_weights": "peft's configuration",
    "normalizer": "a tokenizer of tokenizers",
    "pre_tokenizer": "a tokenizer of tokenizers",
    "settings": "a machine's test case of Hypothesis",
    "should_exit": "uvicorn's server",
}
"""Attribute that tests write -> the object that has it."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _names(target: ast.AST) -> Iterator[str]:
    """Names that an assignment to `target` binds, and the attributes of `self` and `cls`."""
    if isinstance(target, ast.Name):
        yield target.id
    elif (
        isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
    ):
        yield target.attr
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _names(element)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For) else []


def defined(tree: ast.Module) -> Iterator[str]:
    """Names of attributes that a module defines: its own, its classes' and their objects'."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
                    yield statement.name
                for target in _targets(statement):
                    yield from _names(target)
                    if "__slots__" in _names(target) and isinstance(statement, ast.Assign):
                        yield from (c.value for c in ast.walk(statement.value) if isinstance(c, ast.Constant))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("SimpleNamespace"):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        else:
            for target in _targets(node):
                yield from (name for name in _names(target) if isinstance(target, ast.Attribute | ast.Tuple))


def _writes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, attribute) of every write to an object that is not `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            if isinstance(node.args[1], ast.Constant):
                yield node.lineno, node.args[1].value


def _raises_not(tree: ast.Module) -> Iterator[int]:
    """Lines of `setattr(..., raising=False)` and `delattr(..., raising=False)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[3:] == "attr":
            if any(keyword.arg == "raising" for keyword in node.keywords):
                yield node.lineno


def check(root: Path, external: dict[str, str] | None = None) -> list[str]:
    """One line for each write in the tests of `root` to an attribute that nothing defines."""
    external = EXTERNAL if external is None else external
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in (*PACKAGE_FOLDERS, *TEST_FOLDERS)
        for path in sorted((root / folder).rglob("*.py"))
    }
    in_tests = {path for path in trees if path.relative_to(root).parts[0] in TEST_FOLDERS}
    own = {name for path, tree in trees.items() if path not in in_tests for name in defined(tree)}
    known = own | {name for path in in_tests for name in defined(trees[path]) if not name.startswith("_")}
    complaints, used = [], set()
    for path, tree in trees.items():
        if path.relative_to(root).parts[0] != "tests":
            continue
        place = path.relative_to(root).as_posix()
        for line, name in _writes(tree):
            if name in external and name not in known:
                used.add(name)
            elif name not in known:
                complaints.append(f"{place}:{line}: no class of the package has the attribute {name!r} that is written")
        complaints += [
            f"{place}:{line}: raising=False makes an attribute that may not exist" for line in _raises_not(tree)
        ]
    return complaints + [f"EXTERNAL: no test writes {name!r}" for name in external if name not in used]


def main(arguments: list[str]) -> int:
    """Check the tree at the given root, or at this repository's; returns the exit status."""
    complaints = check(Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent)
    print("\n".join(complaints) or "Tests: all attributes that they write exist")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
