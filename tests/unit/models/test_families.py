"""A model family is one module of `models/families`: no other module knows its name."""

import ast
from pathlib import Path

import pytest
import torch

from outrider.models.config import config_from_hf
from outrider.models.families import FAMILIES, FamilyTraits, supported_architectures
from outrider.platform.core.errors import UnsupportedModelError


def strings(file: Path) -> set[str]:
    """Values of all string constants of a module, docstrings included."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_a_new_family_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {
        "architectures": ["NovelForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 128,
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError):
        config_from_hf(raw, torch.float32)
    traits = FamilyTraits(defaults={"vocab_size": 96, "max_position_embeddings": 512}, qk_norm=True)
    monkeypatch.setitem(FAMILIES, "NovelForCausalLM", traits)
    config = config_from_hf(raw, torch.float32)
    assert (config.vocab_size, config.max_position_embeddings, config.qk_norm) == (96, 512, True)
    assert "NovelForCausalLM" in supported_architectures()


@pytest.mark.slow
def test_no_other_module_names_a_family(repo_root: Path) -> None:
    files = [file for part in ("kernels", "lora", "models", "platform") for file in (repo_root / part).rglob("*.py")]
    names = {name for architecture in FAMILIES for name in (architecture, architecture.removesuffix("ForCausalLM"))}
    names |= {name.lower() for name in names}
    families = repo_root / "models" / "families"
    tools = repo_root / "platform" / "http" / "openai" / "tools"  # names of parsers, which are vLLM's
    tokenizers = repo_root / "models" / "checkpoint" / "gguf_tokenizer.py"  # names of tokenizers, which are llama.cpp's
    found = {file: strings(file) & names for file in files if not {families, tools, tokenizers} & {file, *file.parents}}
    found = {file: named - {file.parent.name} for file, named in found.items()}  # a kernel may be called like a family
    assert {file: named for file, named in found.items() if named} == {}
