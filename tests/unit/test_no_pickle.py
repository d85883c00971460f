"""Nothing is unpickled but tensors, and no code of others is run: neither from disk nor from another process."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("kernels", "lora", "models", "platform", "spec_decode")
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
FORBIDDEN_CALLS = {"eval", "exec"}
ALLOWED = {"models/checkpoint/weight_files.py": {"pickle"}}
"""path -> what it may use all the same. That one names the error of a refused file."""


def uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                yield node.func.id
            if ast.unparse(node.func) == "torch.load" and not any(
                keyword.arg == "weights_only" and getattr(keyword.value, "value", None) is True
                for keyword in node.keywords
            ):
                yield "torch.load"  # of anything but tensors
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code" and getattr(keyword.value, "value", None) is not False:
                    yield "trust_remote_code"


FORBIDDEN = FORBIDDEN_IMPORTS | FORBIDDEN_CALLS | {"torch.load", "trust_remote_code"}


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_pickle_is_not_used(repo_root: Path, package: str):
    for file in (repo_root / package).rglob("*.py"):
        path = str(file.relative_to(repo_root))
        found = set(uses(ast.parse(file.read_text(), path))) & FORBIDDEN
        assert found <= ALLOWED.get(path, set()), path


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "eval(x)",
        "load(trust_remote_code=True)",
    ],
)
def test_uses_of_pickle_would_be_found(code):
    assert set(uses(ast.parse(code))) & FORBIDDEN
