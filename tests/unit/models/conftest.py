"""Tiny models of each family, saved by transformers, and a driver that runs ours as an engine would."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.models.batch import LayerKV, SequenceRows, allocate_kv, build_batch
from outrider.models.decoder import Decoder
from outrider.models.states.memory import LayerStates, allocate_states
from outrider.platform.core.batch import RowStates

from ...tiny_families import Family, build

BLOCK_SIZE = 4
NUM_BLOCKS = 200
NUM_STATES = 3


@dataclass
class Driver:
    """Runs rows of tokens over a small cache full of stale values, with blocks in random order."""

    model: Decoder
    kv: list[LayerKV] = field(init=False)
    states: list[LayerStates] = field(init=False)
    tables: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    prompt_lens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv = allocate_kv(self.model.kv_layers, NUM_BLOCKS, BLOCK_SIZE, self.model.config.dtype)
        for layer in self.kv:
            layer.k.normal_(0, 30)
            layer.v.normal_(0, 30)
        specs, dtype = self.model.state_layers, self.model.config.dtype
        self.states = allocate_states(specs, NUM_STATES * 100, dtype)
        for part in (part for layer in self.states for part in layer if part is not None):
            part[1:].normal_(0, 30)
        self.free = list(range(NUM_BLOCKS))
        random.Random(0).shuffle(self.free)

    def forward_once(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Compute the next tokens of some sequences; returns float32 logits [tokens, vocab] of each."""
        for row, tokens in chunks.items():
            table = self.tables.setdefault(row, [])
            while len(table) * BLOCK_SIZE < self.computed.get(row, 0) + len(tokens):
                table.append(self.free.pop())
        rows = SequenceRows(
            token_ids=[token for tokens in chunks.values() for token in tokens],
            query_lens=[len(tokens) for tokens in chunks.values()],
            starts=[self.computed.get(row, 0) for row in chunks],
            block_tables=[self.tables[row] for row in chunks],
            prompt_lens=[self.prompt_lens.get(row, 0) for row in chunks],
            states=[RowStates(range(1 + NUM_STATES * row, 1 + NUM_STATES * (row + 1)), NUM_STATES) for row in chunks],
        )
        hidden = self.model.forward(build_batch(rows, self.model, self.kv, states=self.states)).hidden
        logits = self.model.compute_logits(hidden).split(rows.query_lens)
        for row, tokens in chunks.items():
            self.computed[row] = self.computed.get(row, 0) + len(tokens)
        return dict(zip(chunks, logits, strict=True))


@pytest.fixture(scope="session")
def driver() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, torch.nn.Module]]:
    """save_tiny("Llama", dtype=..., shard=..., **config) -> (directory, the transformers model in that dtype)."""

    def save(
        family: str, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **config: object
    ) -> tuple[Path, torch.nn.Module]:
        model = build(Family(family, config))
        path = tmp_path_factory.mktemp(family.lower())
        model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
        # Loaded again: `.to` has rounded the rotary frequencies too.
        loaded = type(model).from_pretrained(path, dtype=dtype, attn_implementation="eager")
        return path, loaded.eval()

    return save
