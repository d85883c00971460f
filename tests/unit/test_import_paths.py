"""vLLM's import paths, and the public names, which are all documented."""

import importlib
import re

import pytest

import outrider
from outrider.platform.core.compat.import_paths import PATHS


@pytest.mark.parametrize("path", PATHS)
def test_names_of_a_path(path: str) -> None:
    module = importlib.import_module(f"outrider.{path}")
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__name__ == {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}.get(name, name)
        assert getattr(outrider, name, value) is value
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense


def test_paths_that_are_not_there() -> None:
    for path in ("lora.requests", "v1.nothing", "engine.nothing", "worker"):
        with pytest.raises(ModuleNotFoundError, match=re.escape(f"outrider.{path}")):
            importlib.import_module(f"outrider.{path}")


def test_real_folders_are_not_replaced() -> None:
    from outrider.lora.request import LoRARequest  # type: ignore[import-not-found]

    assert LoRARequest is outrider.LoRARequest
    assert importlib.import_module("outrider.lora").__file__


def test_public_names_are_documented(repo_root) -> None:
    page = (repo_root / "docs/reference/python.md").read_text(encoding="utf-8")
    for name in {*outrider.__all__} - {"__version__"}:  # errors.md renders their whole module
        is_error = isinstance(value := getattr(outrider, name), type) and issubclass(value, Exception)
        assert is_error or re.search(rf"\b{name}\b", page), name
