"""Models of real shapes with random weights, made without a download: a config.json for each, and adapters."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider import LoRARequest
from outrider.models.config import DecoderConfig, config_from_hf
from outrider.platform.cli.bench.random_adapters import AdapterWriter, linear_shapes
from outrider.platform.core.config import EngineArgs
from outrider.platform.engine.engine_core import EngineCore


class ModelShape(NamedTuple):
    """Sizes of a decoder, and the name of its family."""

    name: str
    architecture: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    theta: float = 10000.0

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""
        return config_from_hf(self.raw_config, torch.bfloat16)

    @property
    def _projections(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of all projections of all layers."""
        return [shape for name, shape in linear_shapes(self.config).items() if ".layers." in name]

    @property
    def num_linear(self) -> int:
        """Number of weights that every token is multiplied with, without the head."""
        return sum(inputs * outputs for inputs, outputs in self._projections)

    @property
    def num_streamed(self) -> int:
        """Number of weights that each decode step reads: all but the table of embeddings."""
        return self.num_linear + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of a token in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def rank_row_bytes(self) -> int:
        """Bytes of one rank row of an adapter on all projections, in bfloat16."""
        return 2 * sum(map(sum, self._projections))

    @property
    def raw_config(self) -> dict[str, Any]:
        """Content of config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3" if "Qwen3" in self.architecture else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "dtype": "bfloat16",
            "random_weights": True,
        }

    def write(self, root: Path) -> str:
        """Write the model's folder, which holds only a config.json."""
        folder = root / self.name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw_config), encoding="utf-8")
        return str(folder)


LLAMA_8B = ModelShape("Llama-3-8B", "LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128, 128256, tied=False, theta=500000.0)
QWEN_06B = ModelShape("Qwen3-0.6B", "Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 151936, tied=True, theta=1e6)
SMALL = ModelShape("27M", "LlamaForCausalLM", 512, 1536, 8, 8, 4, 64, 4096, tied=True)
MEDIUM = ModelShape("494M", "Qwen3ForCausalLM", 896, 4864, 24, 14, 2, 64, 151936, tied=True)
TINY = ModelShape("tiny-llama", "LlamaForCausalLM", 64, 96, 2, 4, 2, 16, 512, tied=False)
TINY_QWEN = ModelShape("tiny-qwen3", "Qwen3ForCausalLM", 64, 96, 2, 4, 2, 16, 512, tied=True)


@contextmanager
def running(path: str, device: str, **options: Any) -> Iterator[EngineCore]:
    """Start an engine with random weights, after freeing the memory of earlier ones."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    values = {"dtype": "bfloat16", "load_format": "dummy", "enable_prefix_caching": False, "seed": 0}
    engine = EngineCore(EngineArgs(model=path, device=device, **(values | options)))
    try:
        yield engine
    finally:
        engine.shutdown()


def write_adapters(root: Path, shape: ModelShape, ranks: Sequence[int]) -> list[LoRARequest]:
    """Write adapters of these ranks on all projections."""
    folder = root / f"{shape.name}-adapters"
    folder.mkdir()
    writer = AdapterWriter(folder, shape.config, seed=0)
    return [writer.write(str(index), rank) for index, rank in enumerate(ranks)]
