"""Damaged checkpoints: twenty mutations of each format give a typed error, or a model, and take little memory."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.checkpoint.loader import load_model, read_facts
from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import OutriderError

from ...gguf_files import write_gguf
from ...mutations import MUTATIONS, mutated
from ...quantized_files import CASES, write_quantized
from ...tiny_families import FAMILIES
from ...tokenizer_files import write_sentencepiece, write_tekken, write_tiktoken

pytestmark = pytest.mark.slow

MOST_MEMORY = 512 << 10
"""Growth of the process in KiB, which is that of reading whole files of some MB many times."""


@pytest.fixture(scope="module")
def folder(save_tiny: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in all formats, with a tokenizer."""
    path = tmp_path_factory.mktemp("whole")
    shutil.copytree(save_tiny("Llama", hidden_size=64, intermediate_size=96)[0], path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, path)
    write_gguf(demo_model_path(), path / "m.gguf")
    return path


def attempt(read: Callable, *args: object) -> bool:
    """True when it is refused."""
    try:
        read(*args)
    except OutriderError:
        return True
    return False


KINDS = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]
KINDS += ["m.gguf", "config.json", "tokenizer.json", "tokenizer_config.json", "tekken.json"]
KINDS += ["tokenizer.model", "tokenizer.model of tiktoken"]
TOKENIZERS = ("tokenizer", "tekken")


@pytest.fixture(params=KINDS)
def damaged(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> tuple[Path, str]:
    """(a folder in which a file matters, that file)."""
    kind, _, form = request.param.partition(" of ")
    work = shutil.copytree(folder, tmp_path / "work")
    weights = work / "model.safetensors"
    if "bin" in kind or "index" in kind:
        tensors, end = load_file(weights), "bin" if "bin" in kind else "safetensors"
        weights.unlink()
        save = torch.save if end == "bin" else save_file
        parts = dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])
        for number, part in enumerate(parts if "index" in kind else ()):
            save(part, work / f"part-{number}.{end}")
        index = {name: f"part-{number}.{end}" for number, part in enumerate(parts) for name in part}
        if "index" in kind:
            (work / kind).write_text(json.dumps({"metadata": {"total_size": 9}, "weight_map": index}))
        else:
            save(tensors, work / kind)
    elif kind in ("tokenizer.model", "tekken.json"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (work / name).unlink()
        write = write_tekken if kind == "tekken.json" else write_tiktoken if form else write_sentencepiece
        write(work / kind)
    return work, kind


def test_mutations(damaged: tuple[Path, str]) -> None:
    work, kind = damaged
    whole = (work / kind).read_bytes()
    read = load_tokenizer if kind.startswith(TOKENIZERS) else load_model
    read(work / kind if kind == "m.gguf" else work)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for seed in range(MUTATIONS):
        (work / kind).write_bytes(mutated(whole, kind, seed))
        if kind == "m.gguf":
            refused += attempt(load_model, work / kind) | attempt(load_tokenizer, work / kind)
        else:
            attempt(read_facts, work)
            refused += attempt(read, work)
    assert refused >= MUTATIONS // 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY


@pytest.fixture(scope="module")
def others(save_tiny: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of OTHERS."""
    path = tmp_path_factory.mktemp("others")
    for kind in QUANTISED:
        write_quantized(save_tiny("Llama", **CASES[kind].sizes)[0], path / kind, CASES[kind])
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 2}
    shutil.copytree(save_tiny("GptOss", **sizes, num_experts_per_tok=2)[0], path / "mxfp4")
    tensors = load_file(path / "mxfp4" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    raw = json.loads((path / "mxfp4" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "mxfp4" / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "mxfp4" / "model.safetensors")
    for kind, name in (("gpt-oss", "gpt-oss"), ("deepseek", "deepseek3"), ("falcon", "falcon")):
        folder = save_tiny(FAMILIES[name].prefix, **FAMILIES[name].config)[0]
        shutil.copytree(folder, path / kind)
        write_gguf(folder, path / kind / "m.gguf")
    return path


QUANTISED = ["gptq-act", "awq", "ct-w4-asym", "fp8-blocks", "nf4"]
OTHERS = [
    *((kind, file) for kind in [*QUANTISED, "mxfp4", "deepseek"] for file in ("model.safetensors", "config.json")),
    *((kind, "m.gguf") for kind in ("gpt-oss", "deepseek", "falcon")),
]


@pytest.mark.parametrize(("kind", "name"), OTHERS, ids=map("-".join, OTHERS))
def test_mutations_of_other_checkpoints(kind: str, name: str, others: Path, tmp_path: Path) -> None:
    work = shutil.copytree(others / kind, tmp_path / "work")
    whole = work / name if name == "m.gguf" else work
    load_model(whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for seed in range(MUTATIONS):
        (work / name).write_bytes(mutated((others / kind / name).read_bytes(), name, seed))
        attempt(read_facts, whole)
        refused += attempt(load_model, whole)
    assert refused >= MUTATIONS // 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY
