"""Check that tests write only attributes that exist: to write one that was renamed has no effect.

An attribute that a test writes (`a.b.name = 1`, `setattr(a, "name", 1)`) must be defined somewhere: in the body of a
class, on `self`, in `__slots__`, at the top of a module, or in a `SimpleNamespace`. A private one must be defined in
the package, not in the tests. `monkeypatch.setattr(..., raising=False)` is an error: it would make the attribute.
Attributes of other libraries' objects stand in EXTERNAL; one that no test writes any more is an error too.

The names of all classes are one set: that an attribute belongs to another class is not seen.

Usage: python tools/check_test_writes.py [ROOT]
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE_FOLDERS = ("kernels", "lora", "models", "platform", "spec_decode")
OTHER_FOLDERS = ("benchmarks", "tests", "tools")
"""Folders whose objects tests write, too."""
EXTERNAL = {
    "__cause__": "an exception",
    "__dict__": "an object",
    "architectures": "transformers' configuration",
    "create_or_update_model_card": "PEFT's model",
    "eos_token": "transformers' tokenizer",
    "eos_token_id": "transformers' generation config",
    "exitstatus": "pytest's session",
    "get_added_vocab": "transformers' tokenizer",
    "get_device_name": "torch.cuda",
    "image_outputs": "transformers' output of a model",
    "init_lora_weights": "PEFT's configuration",
    "normalizer": "a tokenizer of the library tokenizers",
    "pre_tokenizer": "a tokenizer of the library tokenizers",
    "routes": "Starlette's router",
    "settings": "Hypothesis' test case of a machine",
    "should_exit": "uvicorn's server",
}
"""Attribute that tests write -> the object that has it."""
_CLASS_OR_FUNCTION = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Facts:
    """Attributes in a module."""

    defined: set[str] = field(default_factory=set)
    """Names of the module's, its classes' and their objects' attributes."""
    writes: list[tuple[int, str]] = field(default_factory=list)
    """(line, attribute) of each write to an object that is not `self`."""
    lenient: list[int] = field(default_factory=list)
    """Lines of `setattr(..., raising=False)` and `delattr(..., raising=False)`."""


def collect_facts(tree: ast.Module) -> Facts:
    """Facts of a module."""
    facts = Facts()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                facts.defined.update(_bound(statement))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                facts.defined.add(node.attr)
            else:
                facts.writes.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call):
            _add_call(facts, node)
    return facts


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module or class binds."""
    if isinstance(statement, _CLASS_OR_FUNCTION):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        names = [
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        yield from names
        if names == ["__slots__"] and statement.value is not None:
            yield from (str(node.value) for node in ast.walk(statement.value) if isinstance(node, ast.Constant))


def _add_call(facts: Facts, call: ast.Call) -> None:
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg]
    if isinstance(call.func, ast.Name):
        if call.func.id == "SimpleNamespace":
            facts.defined.update(keywords)
        elif call.func.id == "setattr" and isinstance(call.args[1], ast.Constant):
            facts.writes.append((call.lineno, str(call.args[1].value)))
    elif isinstance(call.func, ast.Attribute) and call.func.attr in ("setattr", "delattr") and "raising" in keywords:
        facts.lenient.append(call.lineno)


def check(root: Path, external: Mapping[str, str] = EXTERNAL) -> list[str]:
    """One line for each write in the tests of `root` to an attribute that nothing defines."""
    found = {
        path.relative_to(root): collect_facts(ast.parse(path.read_text(encoding="utf-8")))
        for folder in (*PACKAGE_FOLDERS, *OTHER_FOLDERS)
        for path in sorted((root / folder).rglob("*.py"))
    }
    known: set[str] = set()
    for path, facts in found.items():
        is_package = path.parts[0] in PACKAGE_FOLDERS
        known |= {name for name in facts.defined if is_package or not name.startswith("_")}
    complaints, unused = [], set(external)
    for path, facts in found.items():
        if path.parts[0] != "tests":
            continue
        for line, name in facts.writes:
            unused.discard(name)
            if name not in known and name not in external:
                complaints.append(f"{path.as_posix()}:{line}: nothing defines the attribute {name!r} that is written")
        complaints += [f"{path.as_posix()}:{line}: raising=False makes what may not exist" for line in facts.lenient]
    return complaints + [f"EXTERNAL: no test writes {name!r}" for name in sorted(unused)]


def main(arguments: list[str]) -> int:
    """Check the tree at the given root, or at this repository's; returns the exit status."""
    complaints = check(Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent)
    print("\n".join(complaints) or "Tests: the attributes that they write exist")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
