"""config.json is read with each family's rules; unsupported fields are refused by name."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.models.config import config_from_hf, stored_dtype
from outrider.models.families import supported_architectures
from outrider.models.layers.rope import RotaryEmbedding, inverse_frequencies
from outrider.platform.core.errors import UnsupportedModelError

RAW: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}

MISTRAL = {**{key: value for key, value in RAW.items() if key != "num_key_value_heads"}, "num_attention_heads": 32}


def read(family: str, **changes: Any) -> Any:
    return config_from_hf({**RAW, "architectures": [f"{family}ForCausalLM"], **changes}, torch.float32)


def test_supported_architectures_are_named() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read("Bert")
    assert "BertForCausalLM" in str(caught.value)
    assert supported_architectures() == sorted(supported_architectures())
    assert {"GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM"} <= set(supported_architectures())
    assert all(name in str(caught.value) for name in supported_architectures())


def test_a_config_without_architectures_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        config_from_hf({**RAW, "model_type": "gpt2"}, torch.float32)


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"hidden_act": "relu"}, "hidden_act", "relu"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantization_config.quant_method", "quip"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters", "yarn"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope_scaling", "proportional"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling", "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters", "flat"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}, "rope_parameters", "rope_theta|theta"),
        (
            {"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {"factor": 2.0, "type": "linear"}},
            "rope_scaling",
            "agree",
        ),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": "linear"}, "rope_scaling", "agree"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3"),
        ({"head_dim": 15}, "head_dim", "15"),
        ({"vocab_size": "many"}, "vocab_size", "many"),
        ({"hidden_size": None}, "hidden_size", "None"),
        ({"architectures": -1}, "architectures", "-1"),
        ({"architectures": [[1]]}, "architectures", "1"),
        ({"rms_norm_eps": True}, "rms_norm_eps", "True"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps", "inf"),
        ({"rope_theta": float("nan")}, "rope_scaling", "theta.*nan"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "rope_scaling", "factor"),
        ({"rope_theta": 1e-320}, "rope_scaling", "theta.*1e-320"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 1e-320}, "logits_scaling", "1e-320"),
        ({"intermediate_size": 10**30}, "intermediate_size", "at most 16777216"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers", "at most 4096"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        read("Llama", **changes)
    assert caught.value.param == param


JUNK = ["x", [], {}, [1, "a"], -1, 0, 1.5, float("nan"), float("inf"), 10**30, 10**400, True, None, {"a": {}}, [[1]]]
FIELDS = [
    *RAW,
    *("architectures", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "hidden_act"),
    *("sliding_window", "use_sliding_window", "layer_types", "max_window_layers", "quantization_config"),
    *("attention_bias", "tie_word_embeddings", "partial_rotary_factor", "dtype"),
]


@pytest.mark.parametrize("field", FIELDS)
def test_junk_in_any_field_is_read_or_refused(field: str) -> None:
    """And an accepted config makes a rotary embedding and a norm that can be computed."""
    window = {"use_sliding_window": True, "sliding_window": 5}
    for value in JUNK:
        try:
            config = read("Qwen2", **{**window, field: value})
        except UnsupportedModelError:
            continue
        assert 0.0 < config.rms_norm_eps < float("inf")
        assert inverse_frequencies(config.rope, config.head_dim).isfinite().all()


def test_windows() -> None:
    assert read("Llama", sliding_window=5).windows == (None,) * 4
    assert read("Mistral", sliding_window=5).windows == (5,) * 4
    assert read("Mistral", sliding_window=5).sliding_window == 5
    assert read("Mistral", sliding_window=None).windows == (None,) * 4
    assert read("Mistral").windows == (4096,) * 4
    assert read("Qwen2", sliding_window=5).windows == (None,) * 4
    switched = {"use_sliding_window": True, "sliding_window": 5}
    mixed = read("Qwen2", **switched, max_window_layers=3)
    assert mixed.windows == (None, None, None, 5)
    assert mixed.sliding_window is None
    types = ["sliding_attention", "full_attention"] * 2
    assert read("Qwen3", **switched, layer_types=types).windows == (5, None, 5, None)


def test_layer_types_are_checked() -> None:
    for types, said in ((["full_attention"], "1 entries"), (["linear_attention"] * 4, "linear_attention")):
        with pytest.raises(UnsupportedModelError, match=said) as caught:
            read("Qwen3", layer_types=types)
        assert caught.value.param == "layer_types"


def test_biases_and_head_norms_of_each_family() -> None:
    def traits(config: Any) -> tuple[bool, bool, bool, bool]:
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert traits(read("Llama")) == (False, False, False, False)
    assert traits(read("Llama", attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert traits(read("Mistral", attention_bias=True, mlp_bias=True)) == (False, False, False, False)
    assert traits(read("Qwen2")) == (True, False, False, False)
    assert traits(read("Qwen3", attention_bias=True)) == (True, True, False, True)


def test_absent_and_null_fields_take_the_familys_defaults() -> None:
    assert read("Llama", head_dim=None).head_dim == 16
    assert read("Qwen3").head_dim == 128
    assert read("Llama", num_key_value_heads=None).num_kv_heads == 4
    assert read("Mistral", num_key_value_heads=None).num_kv_heads == 4
    assert config_from_hf({"architectures": ["MistralForCausalLM"], **MISTRAL}, torch.float32).num_kv_heads == 8
    assert read("Llama").rope.theta == 10000.0
    assert read("Llama", rope_theta=5e5).rope.theta == 5e5
    assert read("Llama", rope_theta=1.0, rope_parameters={"rope_theta": 7.0}).rope.theta == 7.0


def test_both_names_of_a_rotation_may_be_in_one_file() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 4096}
    config = read(
        "Qwen2",
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **scaling},
        rope_scaling={"type": "yarn", **scaling},
    )
    assert config.rope == read("Qwen2", rope_theta=1e6, rope_scaling={"type": "yarn", **scaling}).rope
    assert (config.rope.rope_type, config.rope.original_max_position_embeddings) == ("yarn", 4096)


def test_the_default_rotation_of_window_layers_has_its_own_base() -> None:
    for sliding in ({}, {"sliding_attention": None}, {"sliding_attention": {"rope_type": "default"}}):
        yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0, "original_max_position_embeddings": 64}
        parameters = {"full_attention": yarn, **sliding}
        # The number next to them counts for families with one rotation alone.
        more = {"sliding_window_pattern": 2, "original_max_position_embeddings": 32}
        config = read("Gemma3", rope_parameters=parameters, **more)
        assert [rope.theta for rope in config.layer_ropes] == [1e4, 5e5, 1e4, 5e5]
        assert config.rope.original_max_position_embeddings == 64


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2},
        {"mscale": 1.0, "mscale_all_dim": 0.8},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
        {"truncate": False},
        {"rope_theta": 100.0},  # the slow bound lies in the upper half of the dimensions
        {"rope_theta": 20.0, "truncate": False},  # beyond the last one
    ],
)
def test_frequencies_of_yarn_are_those_of_transformers(extra: dict[str, Any]) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096, **extra}
    shape = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 16384}
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**shape, rope_parameters=scaling), torch.device("cpu"))
    config = read("Llama", **shape, num_key_value_heads=8, rope_parameters=scaling)
    torch.testing.assert_close(inverse_frequencies(config.rope, config.head_dim), wanted, rtol=1e-6, atol=0.0)
    assert config.rope.attention_factor == pytest.approx(factor)
    rope = RotaryEmbedding([config.rope], config.head_dim, dtype=torch.float32, device=torch.device("cpu"))
    assert rope.rotations(torch.tensor([0]), 1)[0].cos.flatten()[0].item() == pytest.approx(factor)


def test_the_context_length_counts_a_rope_scaling() -> None:
    def length(**scaling: Any) -> int:
        return read("Llama", max_position_embeddings=2048, rope_scaling=scaling).max_position_embeddings

    assert length(type="linear", factor=4.0) == 8192
    assert length(rope_type="linear", factor=2.5) == 5120
    assert length(rope_type="default") == 2048
    assert length(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048) == 8192
    assert length(rope_type="yarn", factor=4.0, original_max_position_embeddings=512) == 2048
    assert length(rope_type="dynamic", factor=4.0) == 2048
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    assert length(rope_type="llama3", **llama3) == 2048


def test_frequencies_of_llama_3_1_are_those_of_transformers() -> None:
    """The wavelengths of the published config lie below, in and above the band that is scaled smoothly."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    published = LlamaConfig(**shape, max_position_embeddings=131072, rope_parameters=scaling)
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](published, torch.device("cpu"))
    config = read("Llama", **shape, max_position_embeddings=131072, rope_parameters=scaling)
    assert (config.head_dim, config.max_position_embeddings) == (128, 131072)
    torch.testing.assert_close(inverse_frequencies(config.rope, config.head_dim), wanted, rtol=1e-6, atol=0.0)


def test_stored_dtype() -> None:
    assert stored_dtype({"dtype": "bfloat16"}) == "bfloat16"
    assert stored_dtype({"torch_dtype": "torch.float16"}) == "float16"
    assert stored_dtype({}) == "float32"
    with pytest.raises(UnsupportedModelError, match="float8_e4m3fn"):
        stored_dtype({"dtype": "float8_e4m3fn"})


def test_a_scaling_of_olmo_3_is_for_layers_without_a_window() -> None:
    raw = {
        **{"architectures": ["Olmo3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4},
        **{"intermediate_size": 128, "rope_theta": 5e5, "max_position_embeddings": 65536, "sliding_window": 8},
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    }
    config = config_from_hf(raw, torch.float32)
    assert [(rope.rope_type, rope.theta) for rope in config.layer_ropes] == [("default", 5e5)] * 3 + [("yarn", 5e5)]
    assert config.windows == (8, 8, 8, None)
    assert config.max_position_embeddings == 65536
