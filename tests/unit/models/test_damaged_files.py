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

from outrider.models.checkpoint.loader import load_model, read_facts
from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import OutriderError

from ...gguf_files import write_gguf

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
        from safetensors.torch import load_file

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
