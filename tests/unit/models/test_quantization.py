"""Quantised checkpoints: logits of each format are those of its own dequantised weights; damage is a typed error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.checkpoint.loader import load_model, read_facts
from outrider.models.checkpoint.weight_files import StoredTensor
from outrider.models.quantization import read_format, unpack
from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError

from ...quantized_files import CASES, write_quantized

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
# Rounding of W8A8's inputs: 1/254 of the largest, in each product.
ROUNDED = 0.1
_SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
OPTIONS = {
    "GPT2": {"num_key_value_heads": 4},
    "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 64},
    "Qwen2Moe": {**_SPARSE, "num_experts": 3, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {**_SPARSE, "num_experts": 3},
    "DeepseekV2": {
        **{**_SPARSE, "n_routed_experts": 3, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32},
        **{"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    },
}


@pytest.fixture(scope="module")
def make(save_tiny: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make("gptq") -> folder; its subfolder "dense" has the same weights in float32."""
    made: dict[tuple[str, str], Path] = {}

    def write(kind: str, family: str = "Llama") -> Path:
        if (kind, family) not in made:
            made[kind, family] = tmp_path_factory.mktemp(kind)
            sizes = {**CASES[kind].sizes, **OPTIONS.get(family, {})}
            write_quantized(save_tiny(family, **sizes)[0], made[kind, family], CASES[kind])
        return made[kind, family]

    return write


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_logits_are_those_of_the_dequantised_weights(kind: str, make: Callable, driver: Callable) -> None:
    folder = make(kind)
    ours, dense = (
        driver(load_model(path, "float32")).forward_once({0: TOKENS})[0] for path in (folder, folder / "dense")
    )
    scale = float(dense.abs().max())
    if CASES[kind].rounds_inputs:
        assert 1e-5 * scale < float((ours - dense).abs().max()) < ROUNDED * scale
    else:
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("kind", ["gptq-act", "ct-int8", "ct-w8a8", "fp8-blocks", "nf4"])
def test_bfloat16_rounds_as_the_dequantised_weights_do(kind: str, make: Callable, driver: Callable) -> None:
    folder = make(kind)
    ours, rounded, exact = (
        driver(load_model(path, dtype)).forward_once({0: TOKENS})[0]
        for path, dtype in ((folder, "bfloat16"), (folder / "dense", "bfloat16"), (folder, "float32"))
    )
    # Twice the error: the two round at other places, and random layers amplify it.
    assert float((ours - exact).square().mean()) < 4 * float((rounded - exact).square().mean())


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Phi3", "Gemma2", "GPT2"])
def test_families_with_merged_projections_and_biases(family: str, make: Callable, driver: Callable) -> None:
    folder = make("gptq", family)
    ours, dense = (
        driver(load_model(path, "float32")).forward_once({0: TOKENS})[0] for path in (folder, folder / "dense")
    )
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-5 * float(dense.abs().max()))


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("awq", "Qwen3Moe"), ("awq", "DeepseekV2"), ("gptq-act", "Mixtral"), ("gptq", "Qwen2Moe"),
        ("ct-w4", "DeepseekV2"), ("ct-w4", "Qwen3Moe"), ("fp8-blocks", "DeepseekV2"), ("fp8", "Mixtral"),
        ("ct-int8", "Mixtral"), ("nf4", "Qwen3Moe"),
    ],
)  # fmt: skip
def test_experts_and_latent_attention(kind: str, family: str, make: Callable, driver: Callable) -> None:
    folder = make(kind, family)
    ours, dense = (
        driver(load_model(path, "float32")).forward_once({0: TOKENS})[0] for path in (folder, folder / "dense")
    )
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-5 * float(dense.abs().max()))
    rounded = driver(load_model(folder, "bfloat16")).forward_once({0: TOKENS})[0]
    assert bool(rounded.isfinite().all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_files_of_the_library_itself(bits: int, symmetric: bool, tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=bits, strategy="group", group_size=16, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")
    state = {"weight": torch.randn(24, 48), "weight_scale": torch.rand(24, 3) * 0.2 + 0.1}
    state["weight_zero_point"] = torch.zeros(24, 3, dtype=torch.int8)
    if not symmetric:
        state["weight_zero_point"] = torch.randint(-8, 8, (24, 3), dtype=torch.int8)
    stored = PackedQuantizationCompressor.compress(state, scheme)
    config = {"quant_method": "compressed-tensors", "config_groups": {"a": scheme.model_dump(mode="json")}}
    form = read_format({"quantization_config": config | {"format": "pack-quantized"}})
    assert form is not None
    files = {f"up.{name}": StoredTensor(tuple(tensor.shape), tensor.clone) for name, tensor in stored.items()}
    weight = unpack(files, form, lambda _: True, "model")["up.weight"].read()
    expected = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    torch.testing.assert_close(weight.dequantized(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [("group_0", "group_1", "group_2"), ("group_2", "group_1", "group_0")])
def test_the_nearest_target_of_overlapping_groups_counts(order: tuple[str, ...]) -> None:
    """A module's name, then an expression, then its class, in whatever order the groups stand."""
    config = CASES["ct-w8a8"].config
    plain = config["config_groups"]["group_0"]
    groups = {
        "group_0": plain,
        "group_1": plain | {"targets": ["re:.*proj"], "input_activations": None},
        "group_2": plain | {"targets": ["k_proj"]},
    }
    form = read_format({"quantization_config": config | {"config_groups": {name: groups[name] for name in order}}})
    codes, scales = torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1)
    parts = {"weight": codes, "weight_scale": scales}
    files = {
        f"{module}.{part}": StoredTensor(tuple(tensor.shape), tensor.clone)
        for module in ("fc", "q_proj", "k_proj")
        for part, tensor in parts.items()
    }
    weights = unpack(files, form, lambda name: True, "model")
    rounded = [weights[f"{module}.weight"].read().input_bits for module in ("fc", "q_proj", "k_proj")]
    assert rounded == [8, None, 8]


def test_of_several_groups_one_must_have_the_module_as_a_target() -> None:
    config = CASES["ct-w8a8"].config
    plain = config["config_groups"]["group_0"]
    parts = {"weight": torch.ones(2, 4, dtype=torch.int8), "weight_scale": torch.ones(2, 1)}
    files = {f"fc.{part}": StoredTensor(tuple(tensor.shape), tensor.clone) for part, tensor in parts.items()}

    def read(*targets: str) -> object:
        groups = {f"group_{index}": plain | {"targets": [target]} for index, target in enumerate(targets)}
        form = read_format({"quantization_config": config | {"config_groups": groups}})
        return unpack(files, form, lambda name: True, "model")["fc.weight"].read()

    assert read("Embedding").input_bits == read("k_proj", "fc").input_bits == 8
    with pytest.raises(InvalidRequestError, match=r"fc cannot be read: no group of the config_groups"):
        read("k_proj", "q_proj")


_CT_FLOAT8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}},
}


def _ct_float8(**inputs: object) -> dict[str, object]:
    (group,) = _CT_FLOAT8["config_groups"].values()
    inputs = {"type": "float", "num_bits": 8} | inputs
    return _CT_FLOAT8 | {"config_groups": {"group_0": group | {"input_activations": inputs}}}


@pytest.mark.parametrize(
    ("config", "input_scale", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, None, 0.0),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 0.25, 0.0),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 0.25, 0.25),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None, 0.0),
        ({"quant_method": "fp8", "activation_scheme": None}, 0.25, None),
        ({"quant_method": "fp8"}, None, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 0.25, 0.25),
        ({"quant_method": "fbgemm_fp8"}, None, 0.0),
        (_ct_float8(strategy="token", dynamic=True), None, 0.0),
        (_ct_float8(strategy="tensor", dynamic=False), 0.25, 0.25),
        (_ct_float8(strategy="group", group_size=128, dynamic=True), None, None),
        (_ct_float8(num_bits=4), None, None),
        (_CT_FLOAT8, None, None),
    ],
)
def test_float8_inputs_as_the_config_says(
    config: dict[str, object], input_scale: float | None, expected: float | None
) -> None:
    form = read_format({"quantization_config": config})
    parts = {"weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}
    if input_scale is not None:
        parts["input_scale"] = torch.tensor(input_scale)

    def read() -> Any:
        stored = {f"fc.{name}": StoredTensor(tuple(part.shape), part.clone) for name, part in parts.items()}
        return unpack(stored, form, lambda name: True, "model")["fc.weight"].read()

    assert read().float8_scale == expected
    if expected:
        parts["input_scale"] = torch.zeros(())
        assert read().float8_scale == 0.0, "a scale for each token"


@pytest.mark.parametrize(("bound", "expected"), [(None, math.inf), (1200.0, 1200.0), (7, 7.0)])
def test_the_bound_of_float8_inputs(bound: float | None, expected: float) -> None:
    form = read_format({"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": bound}})
    parts = {"weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(2, 1)}
    parts["input_scale_ub"] = torch.tensor([3.0])  # some files repeat the number, which is the config's
    stored = {f"fc.{name}": StoredTensor(tuple(part.shape), part.clone) for name, part in parts.items()}
    weight: Any = unpack(stored, form, lambda name: True, "model")["fc.weight"].read()
    assert (weight.float8_scale, weight.float8_bound) == (0.0, expected)


@pytest.mark.parametrize("bound", [0, -1.0, True, "1200", math.inf, math.nan, [1.0]])
def test_a_bound_that_is_none_is_refused(bound: object) -> None:
    with pytest.raises(UnsupportedModelError, match="activation_scale_ub"):
        read_format({"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": bound}})


def test_facts_name_the_format(make: Callable) -> None:
    assert read_facts(make("gptq-act")).quantization == "gptq"
    assert read_facts(make("gptq-act") / "dense").quantization is None


UNSUPPORTED = {
    "quant_method": {"quant_method": "quip"},
    "bits": {"quant_method": "gptq", "bits": 3},
    "group_size": {"quant_method": "gptq", "bits": 4, "group_size": 0},
    "checkpoint_format": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "dynamic": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*gate.*": {"bits": 8}}},
    "version": {"quant_method": "awq", "version": "gemv"},
    "zero_point": {"quant_method": "awq", "zero_point": False},
    "format": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
    "format of awq": {"quant_method": "awq", "format": "gemv"},
    "config_groups": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "weight_block_size": {"quant_method": "fp8", "weight_block_size": [0, "x"]},
    "bnb_4bit_quant_storage": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_storage": "bfloat16",
    },
}


@pytest.mark.parametrize("option", UNSUPPORTED)
def test_options_that_are_not_served_are_named(option: str, make: Callable, tmp_path: Path) -> None:
    raw = json.loads((make("gptq") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": UNSUPPORTED[option]}))
    with pytest.raises(UnsupportedModelError, match=option.split()[0]) as caught:
        read_facts(tmp_path)
    assert caught.value.param == f"quantization_config.{option.split()[0]}"


# Damaged parts of packed weights, and those damages that make a difference.
PARTS = {
    "awq": ("scales", "missing shape dtype nan"),
    "gptq-act": ("g_idx", "shape dtype nan"),
    "ct-w4-asym": ("weight_zero_point", "shape dtype"),
    "ct-int8": ("weight_scale", "missing shape dtype nan"),
    "fp8-blocks": ("weight_scale_inv", "missing shape dtype nan"),
    "nf4": ("weight.nested_absmax", "missing shape dtype nan"),
    "bnb-int8": ("SCB", "missing shape dtype nan"),
}


def test_a_weight_without_inputs_is_one_that_the_model_refuses_by_its_shape() -> None:
    form = read_format({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}})
    shapes = {"qweight": (0, 8), "qzeros": (0, 1), "scales": (0, 8)}
    files = {f"up.{part}": StoredTensor(shape, partial(torch.zeros, shape)) for part, shape in shapes.items()}
    assert unpack(files, form, lambda name: True, "model")["up.weight"].shape == (8, 0)


@pytest.mark.parametrize(("kind", "damage"), [(kind, one) for kind in PARTS for one in PARTS[kind][1].split()])
def test_damaged_parts_are_named(kind: str, damage: str, make: Callable, tmp_path: Path) -> None:
    source = make(kind)
    name = f"model.layers.1.mlp.up_proj.{PARTS[kind][0]}"
    tensors = load_file(source / "model.safetensors")
    broken = tensors.pop(name)
    if damage == "shape":
        tensors[name] = torch.cat((broken, broken))
    elif damage == "dtype":
        tensors[name] = broken.double()
    elif damage == "nan":
        tensors[name] = torch.full_like(broken, float("nan") if broken.is_floating_point() else 77)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(InvalidRequestError, match=r"model\.layers\.1\.mlp\.up_proj"):
        load_model(tmp_path, "float32")


def test_a_zero_point_whose_product_with_the_scale_is_not_finite_is_refused(make: Callable, tmp_path: Path) -> None:
    source = make("ct-w4-asym")
    tensors, module = load_file(source / "model.safetensors"), "model.layers.1.mlp.up_proj"
    tensors[f"{module}.weight_scale"][3, 1] = 3e38  # finite
    tensors[f"{module}.weight_zero_point"][:] = -1  # 15 everywhere
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(InvalidRequestError, match=r"model\.layers\.1\.mlp\.up_proj.*not finite"):
        load_model(tmp_path, "float32")


def test_cache_scales_with_packed_weights_are_read(make: Callable, tmp_path: Path) -> None:
    source = make("fp8")
    tensors = load_file(source / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_proj.v_scale")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    model = load_model(tmp_path, "float32")
    assert [scales.are_used for scales in model.cache_scales().values()] == [True, False]


def test_a_bias_that_the_model_has_not_must_be_zero(make: Callable, tmp_path: Path) -> None:
    source = make("gptq")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(InvalidRequestError, match="bias"):
        load_model(tmp_path, "float32")


def test_a_config_without_packed_tensors_is_refused(make: Callable, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((make("gptq") / "dense" / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text((make("gptq") / "config.json").read_text())
    with pytest.raises(InvalidRequestError, match="qweight"):
        load_model(tmp_path, "float32")
