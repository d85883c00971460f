"""LongRoPE: frequencies, scale and logits are those of transformers, on both sides of the original context."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.models.checkpoint.loader import load_model
from outrider.models.config import config_from_hf
from outrider.models.layers.rope import inverse_frequencies
from outrider.platform.core.errors import UnsupportedModelError

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
SHORT, LONG = [1.0 + i / 20 for i in range(8)], [1.0 + i for i in range(8)]
FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}
ORIGINAL = {"original_max_position_embeddings": 128}


def read(**changes: Any) -> Any:
    raw = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 131}
    return config_from_hf({**SHAPE, **raw, **changes}, torch.float32)


@pytest.mark.parametrize(
    "scaling",
    [
        {**FACTORS, **ORIGINAL},
        {**FACTORS, **ORIGINAL, "factor": 16.0},
        {**FACTORS, **ORIGINAL, "factor": 0.5},
        {**FACTORS, **ORIGINAL, "factor": 4.0, "attention_factor": 1.7},
    ],
)
def test_frequencies_and_scale_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    theirs = LlamaConfig(**SHAPE, rope_parameters=dict(scaling))
    rope = read(rope_parameters=scaling).rope
    short, long = inverse_frequencies(rope, 16)
    for ours, length in ((short, 128), (long, 129)):
        wanted, scale = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=length)
        assert torch.equal(ours, wanted)
        assert rope.attention_factor == pytest.approx(scale)


def test_the_original_context_may_be_outside_the_scaling() -> None:
    """As in configs of Phi 3's form; the context length is the scaled one."""
    config = read(rope_theta=1e4, rope_scaling={**FACTORS, "type": "longrope"}, **ORIGINAL)
    assert config.rope == read(rope_parameters={**FACTORS, **ORIGINAL}).rope
    assert (config.rope.short_context, config.max_position_embeddings) == (128, 512)
    assert read().rope.short_context is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "lacks original_max_position_embeddings"),
        ({**ORIGINAL, "short_factor": None}, "short_factor must be a list of 8 numbers"),
        ({**ORIGINAL, "long_factor": LONG[:7]}, "long_factor must be a list of 8 numbers"),
        ({**ORIGINAL, "long_factor": [*LONG[:7], 0.0]}, "long_factor must be a positive number"),
        ({"original_max_position_embeddings": 1}, "below 2"),
    ],
)
def test_wrong_fields_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        read(rope_scaling={**FACTORS, **changes})
    assert caught.value.param == "rope_scaling"


def test_logits_match_transformers_in_a_batch_of_short_and_long_prompts(save_tiny: Callable, driver: Callable) -> None:
    """In ragged chunks of one batch, and in a continuation that grows beyond the original context, whose keys keep
    their short rotation."""
    scaling = {**FACTORS, "original_max_position_embeddings": 32}
    path, reference = save_tiny("Llama", head_dim=16, rope_parameters=scaling)
    generator = torch.Generator().manual_seed(3)
    lengths = {0: 32, 1: 33, 2: 7, 3: 70, 4: 28}
    texts = {row: torch.randint(0, 131, (n + 12,), generator=generator).tolist() for row, n in lengths.items()}
    run = driver(load_model(path), prompt_lens=lengths)
    parts: dict[int, list[torch.Tensor]] = {row: [] for row in texts}
    done = dict.fromkeys(texts, 0)
    for step in range(100):
        chunk = {}
        for row, n in lengths.items():
            if done[row] < n + 12:
                count = min([19, 1, 5][(step + row) % 3], n - done[row]) if done[row] < n else 1
                chunk[row] = texts[row][done[row] : done[row] + count]
                done[row] += count
        for row, logits in (run.forward_once(chunk) if chunk else {}).items():
            parts[row].append(logits)
    for row, n in lengths.items():
        with torch.no_grad():
            prompt = reference(torch.tensor([texts[row][:n]]), use_cache=True)
            expected = [prompt.logits[0]]
            for token in texts[row][n:]:
                after = reference(torch.tensor([[token]]), past_key_values=prompt.past_key_values, use_cache=True)
                expected.append(after.logits[0])
        torch.testing.assert_close(torch.cat(parts[row]), torch.cat(expected), atol=1e-4, rtol=0, msg=f"row {row}")
