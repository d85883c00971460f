"""Scales of an fp8 KV cache in a checkpoint: they keep large keys and values within the cache's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.models.batch import allocate_kv
from outrider.models.checkpoint.loader import load_model
from outrider.platform.core.errors import InvalidRequestError

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
# Factors by which keys and values are larger than usual; queries and the output's weights are smaller by them.
KEYS, VALUES = 256.0, 1024.0
ATTENTION = "model.layers.{}.self_attn"
FORMS = {
    "attention": {"k_scale": 7.0, "v_scale": 11.0},
    "projections": {"k_proj.k_scale": 7.0, "v_proj.v_scale": 11.0},
    "outputs": {"k_proj.output_scale": 7.0, "v_proj.output_scale": 11.0},
    "one": {"kv_scale": torch.tensor([11.0])},
}


@pytest.fixture(scope="module")
def write(save_tiny: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """write("Llama", {"k_scale": 7.0}) -> folder of a model with large keys and values."""

    def make(family: str, scales: dict[str, Tensor | float]) -> Path:
        source = save_tiny(family)[0]
        tensors = load_file(source / "model.safetensors")
        part = "proj" if family == "Llama" else "norm"
        for layer in range(2):
            attention = ATTENTION.format(layer)
            factors = {f"k_{part}": KEYS, f"q_{part}": 1 / KEYS, "v_proj": VALUES, "o_proj": 1 / VALUES}
            for name, factor in factors.items():
                tensors[f"{attention}.{name}.weight"] *= factor
            tensors |= {f"{attention}.{name}": torch.as_tensor(scale).clone() for name, scale in scales.items()}
        folder = tmp_path_factory.mktemp("scaled")
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text((source / "config.json").read_text())
        return folder

    return make


def logits(folder: Path, driver: Callable, kind: str = "fp8", dtype: str = "float32") -> Tensor:
    model = load_model(folder, dtype)
    run = driver(model)
    run.kv = allocate_kv(model.kv_layers, 200, 4, model.config.dtype, kv_cache_dtype=kind)
    return torch.cat([run.forward_once({0: part})[0] for part in (TOKENS[:9], TOKENS[9:])])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "form"), [("Llama", form) for form in FORMS] + [("Qwen3", "attention"), ("Olmo2", "attention")]
)
def test_logits_are_nearly_those_of_a_whole_cache(family, form, dtype, write: Callable, driver: Callable) -> None:
    folder, plain = write(family, FORMS[form]), write(family, {})
    whole = logits(plain, driver, "auto", dtype)
    shift, unscaled = ((logits(path, driver, "fp8", dtype) - whole).std() for path in (folder, plain))
    assert 0 < shift < 0.1 * whole.std()
    assert unscaled > 3 * shift
    assert logits(folder, driver, "auto", dtype).equal(whole)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_damaged_scales_are_named(scale: float, write: Callable) -> None:
    with pytest.raises(InvalidRequestError, match=r"layers\.0\.self_attn\.v_scale must be above 0 and finite"):
        load_model(write("Llama", {"v_scale": scale}), "float32")


def test_other_scales_are_left_out(write: Callable, caplog: pytest.LogCaptureFixture) -> None:
    load_model(write("Llama", {"q_scale": 0.5, "k_scale": torch.ones(2)}), "float32")
    assert "4 scales of attention that are not used" in caplog.text
