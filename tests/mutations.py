"""Damage to files of models and adapters: each function takes a file's bytes and returns others."""

from __future__ import annotations

import io
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

import torch

MUTATIONS = 20
"""Number of mutations of each format."""
VALUES = [0, -1, 1 << 40, 1 << 62, 10**400, 1e308, float("nan"), None, True, "", "\0", [], {}, [[[]]], "x" * 9999]
SIZES = [0, 1, 1 << 31, 1 << 40, 1 << 62]
NAMES = ["", ".", "..", "/", "../m.gguf", "config.json", "\0", "x" * 9999, "nosuch.safetensors", "\ud800"]


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
            changed[at : at + 8] = rng.choice(SIZES[2:]).to_bytes(8, "little")
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


def mutate_index(data: bytes, rng: random.Random) -> bytes:
    """Another file, or none, for some tensors of the index of a checkpoint in parts."""
    if rng.random() < 0.3:
        return mutate_json(data, rng)
    raw = json.loads(data)
    for name in rng.sample(list(raw["weight_map"]), rng.choice([1, 5])):
        raw["weight_map"][name] = rng.choice(NAMES + VALUES)
    return json.dumps(raw).encode()


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A header that lies about one tensor or two."""
    if rng.random() < 0.4:
        return mutate_bytes(data, rng)
    end = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:end])
    one, two = rng.sample([entry for name, entry in header.items() if name != "__metadata__"], 2)
    kind = rng.randrange(5)
    if kind == 0:
        one["shape"], two["shape"] = two["shape"], one["shape"]
    elif kind == 1:
        one["shape"] = one["shape"][::-1]
    elif kind == 2:
        one["shape"][rng.randrange(len(one["shape"]))] = rng.choice([*SIZES, -1, 10**30])
    elif kind == 3:
        one["data_offsets"] = rng.choice([two["data_offsets"], one["data_offsets"][::-1], [0, 1 << 62], [0, 8]])
    else:
        one["dtype"] = rng.choice(["F64", "I8", "BOOL", "F8_E4M3", "X"])
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + data[end:]


def mutate_pickle(data: bytes, rng: random.Random) -> bytes:
    """Tensors of other shapes, a huge one that takes no room in the file, or anything else than a tensor."""
    if rng.random() < 0.4:
        return mutate_bytes(data, rng)
    state = torch.load(io.BytesIO(data), weights_only=True)
    one, two = rng.sample(list(state), 2)
    kind = rng.randrange(5)
    if kind == 0:
        state[one], state[two] = state[two], state[one]
    elif kind == 1:
        state[one] = state[one].reshape(tuple(state[one].shape)[::-1])
    elif kind == 2:
        state[one] = torch.zeros(1).expand(rng.choice(SIZES[2:]), 1)
    elif kind == 3:
        state[one] = torch.empty(state[one].shape, device="meta")
    else:
        state[one] = rng.choice([None, 7, [state[two]], state[two].to_sparse(), state[two].to(torch.int8)])
    written = io.BytesIO()
    torch.save(state, written)
    return written.getvalue()


def mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """Another shape, type or place of a tensor."""
    if rng.random() < 0.4:
        return mutate_bytes(data, rng)
    changed = bytearray(data)
    found = rng.choice(list(re.finditer(rb"(?:token_embd|output_norm|blk\.\d+\.\w+)\.weight", data)))
    (dims,) = struct.unpack_from("<I", data, found.end())
    sizes = list(struct.unpack_from(f"<{dims}Q", data, found.end() + 4))
    kind = rng.randrange(5)
    if kind == 0:
        sizes = sizes[::-1]
    elif kind == 1:
        sizes[rng.randrange(dims)] = rng.choice(SIZES)
    struct.pack_into(f"<{dims}Q", changed, found.end() + 4, *sizes)
    after = found.end() + 4 + 8 * dims
    if kind == 2:
        struct.pack_into("<I", changed, found.end(), rng.choice([0, 3, 5, 1 << 31]))
    elif kind == 3:
        struct.pack_into("<I", changed, after, rng.choice([2, 8, 12, 30, 39, 1 << 31]))
    elif kind == 4:
        struct.pack_into("<Q", changed, after + 4, rng.choice([1, 32, *SIZES[2:]]))
    return bytes(changed)


MUTATE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".index.json": mutate_index,
    ".json": mutate_json,
    ".safetensors": mutate_safetensors,
    ".bin": mutate_pickle,
    ".gguf": mutate_gguf,
}
"""By the end of a file's name."""


def mutated(data: bytes, name: str, seed: int) -> bytes:
    """Content of a file of that name, damaged in one of many ways."""
    mutate = next((found for end, found in MUTATE.items() if name.endswith(end)), mutate_bytes)
    return mutate(data, random.Random(seed))
