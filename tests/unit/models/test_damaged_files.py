"""Damaged checkpoints: twenty mutations of each format give a typed error, or a model, and take little memory."""

from __future__ import annotations

import json
import random
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
from ...quantized_files import CASES, write_quantized
from ...tiny_families import FAMILIES

MUTATIONS = 20
MOST_MEMORY = 512 << 10
"""Growth of the process in KiB, which is that of reading whole files of some MB many times."""
VALUES = [0, -1, 1 << 40, 1 << 62, 10**400, 1e308, float("nan"), None, True, "", "\0", [], {}, [[[]]], "x" * 9999]


@pytest.fixture(scope="module")
def folder(save_tiny: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in all formats, with a tokenizer."""
    path = tmp_path_factory.mktemp("whole")
    shutil.copytree(save_tiny("Llama", hidden_size=64, intermediate_size=96)[0], path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, path)
    write_gguf(demo_model_path(), path / "m.gguf")
    return path


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut it, or change bytes of its first part, where the sizes and the offsets are."""
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    changed, head = bytearray(data), min(len(data), 4096)
    for _ in range(rng.choice([1, 4, 40])):
        at = rng.randrange(head - 8)
        if kind == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[at : at + 8] = rng.choice([0xFF, 0x7F, 0x00]).to_bytes(1, "little") * 8
        else:
            changed[at : at + 8] = rng.choice([1 << 31, 1 << 40, 1 << 62]).to_bytes(8, "little")
    return bytes(changed)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Another value somewhere, a key less, or damage as to any file."""
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    raw = json.loads(data)
    place = raw
    while (keys := [key for key in place if isinstance(place[key], dict) and place[key]]) and rng.random() < 0.5:
        place = place[rng.choice(keys)]
    key = rng.choice(list(place))
    if rng.random() < 0.3:
        del place[key]
    else:
        place[key] = rng.choice(VALUES)
    return json.dumps(raw).encode()


def mutated(source: Path, target: Path, mutate: Callable, seed: int) -> None:
    target.write_bytes(mutate(source.read_bytes(), random.Random(seed)))


def attempt(read: Callable, *args: object) -> bool:
    """True when it is refused."""
    try:
        read(*args)
    except OutriderError:
        return True
    return False


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin", "m.gguf", "config.json", "tokenizer.json"])
def test_mutations(kind: str, folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(folder, work)
    if kind == "pytorch_model.bin":
        torch.save(load_file(folder / "model.safetensors"), folder / kind)
        (work / "model.safetensors").unlink()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for seed in range(MUTATIONS):
        mutated(folder / kind, work / kind, mutate_json if kind.endswith("json") else mutate_bytes, seed)
        if kind == "m.gguf":
            refused += attempt(load_model, work / kind) | attempt(load_tokenizer, work / kind)
        elif kind == "tokenizer.json":
            refused += attempt(load_tokenizer, work)
        else:
            attempt(read_facts, work)
            refused += attempt(load_model, work)
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
        mutated(others / kind / name, work / name, mutate_json if name.endswith("json") else mutate_bytes, seed)
        attempt(read_facts, whole)
        refused += attempt(load_model, whole)
    assert refused >= MUTATIONS // 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY
