"""Every field of config.json, with values of a wrong type: an error that names it, or no effect at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from outrider.models.config import config_from_hf
from outrider.platform.core.errors import UnsupportedModelError

from ...tiny_families import FAMILIES, SIZES

_MORE = ["tie_word_embeddings", "attention_bias", "sliding_window", "eos_token_id", "num_labels", "max_window_layers"]
_NAMES = {"transformers_version", "_name_or_path"}


def raw_config(name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    made = getattr(transformers, f"{family.prefix}Config")(**{**SIZES, **family.config})
    architecture = {"GPT2": "GPT2LMHeadModel"}.get(family.prefix, family.prefix.removesuffix("Text") + "ForCausalLM")
    return {**made.to_dict(), "architectures": [architecture]}


def wrong_values(value: object) -> list[Any]:
    """Values that no file of this field has."""
    wrong: list[Any] = [[1, "a"], {"a": {}}]
    if not isinstance(value, str):
        wrong += ["no", "", "8", 10**400]
    if not isinstance(value, float):
        wrong += [-3]
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_type_is_an_error_or_is_not_read(family: str) -> None:
    raw = raw_config(family)
    config_from_hf(raw, torch.float32)
    for field in dict.fromkeys([*raw, *_MORE]):
        if field in _NAMES:
            continue
        for value in wrong_values(raw.get(field)):
            try:
                found = config_from_hf({**raw, field: value}, torch.float32)
            except UnsupportedModelError:
                continue
            without = {name: old for name, old in raw.items() if name != field}
            assert found == config_from_hf(without, torch.float32), (field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("eos_token_id", -5), ("eos_token_id", "a"), ("eos_token_id", [1, "a"]), ("eos_token_id", True),
     ("sliding_window", -3), ("sliding_window", "x"), ("tie_word_embeddings", "no"), ("tie_word_embeddings", 2),
     ("attention_bias", "false"), ("max_window_layers", -1)],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_wrong_values_are_named(family: str, field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config.json: {field} must be") as caught:
        config_from_hf({**raw_config(family), field: value}, torch.float32)
    assert caught.value.param == field
