"""Parsing of PEFT folders: supported forms, refusals and their messages."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from outrider.lora.files.tensor_keys import ModuleShape
from outrider.platform.core.errors import AdapterError

from ..conftest import SIZES, module, tensors, write_adapter
from ..parsing import parse

KNOWN = {module(layer, name): ModuleShape(*sizes) for layer in (0, 1) for name, sizes in SIZES.items()}
Q = module(0, "q_proj")


def read(path, max_rank=8, dtype=torch.float32):
    return parse(str(path), KNOWN, max_rank=max_rank, dtype=dtype)


def test_weights_and_scale(tmp_path):
    adapter = read(write_adapter(tmp_path, rank=4, lora_alpha=8))
    state = tensors(4)
    assert set(adapter.modules) == set(KNOWN)
    assert adapter.rows == 4
    torch.testing.assert_close(adapter.modules[Q].a, state[f"base_model.model.{Q}.lora_A.weight"])
    torch.testing.assert_close(adapter.modules[Q].b, 2 * state[f"base_model.model.{Q}.lora_B.weight"].T)


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.", ""])
@pytest.mark.parametrize("middle", ["", ".default"])
@pytest.mark.parametrize("binary", [False, True])
def test_key_variants_mean_the_same(tmp_path, prefix, middle, binary):
    reference = read(write_adapter(tmp_path / "plain"))
    other = read(write_adapter(tmp_path / "other", tensors(prefix=prefix, middle=middle), binary=binary))
    assert other.digest == reference.digest


def test_keys_of_the_inner_model(tmp_path):
    state = {key.replace("model.model.layers", "model.layers"): value for key, value in tensors().items()}
    assert set(read(write_adapter(tmp_path, state)).modules) == set(KNOWN)


def test_patterns_and_rslora(tmp_path):
    state = tensors(4, modules=("q_proj",)) | tensors(2, modules=("v_proj",))
    path = write_adapter(
        tmp_path, state, rank_pattern={"v_proj": 2}, alpha_pattern={r"layers\.0\.self_attn\.q_proj": 6}, use_rslora=True
    )
    adapter = read(path)
    scales = {(0, "q_proj"): 6 / 4**0.5, (1, "q_proj"): 8 / 4**0.5, (0, "v_proj"): 8 / 2**0.5}
    for (layer, name), scale in scales.items():
        raw = state[f"base_model.model.{module(layer, name)}.lora_B.weight"]
        torch.testing.assert_close(adapter.modules[module(layer, name)].b, scale * raw.T)
    assert adapter.rows == 4


def test_some_layers_only(tmp_path):
    adapter = read(write_adapter(tmp_path, tensors(modules=("k_proj",), layers=(1,)), layers_to_transform=[1]))
    assert set(adapter.modules) == {module(1, "k_proj")}


def test_weights_are_in_the_served_dtype(tmp_path):
    weights = read(write_adapter(tmp_path), dtype=torch.bfloat16).modules[Q]
    assert weights.a.dtype == weights.b.dtype == torch.bfloat16


def test_the_digest_is_of_the_content(tmp_path):
    same = [write_adapter(tmp_path / str(i), base_model_name_or_path=f"base {i}") for i in range(2)]
    other = [
        write_adapter(tmp_path / "alpha", lora_alpha=9),
        write_adapter(tmp_path / "weights", seed=1),
        write_adapter(tmp_path / "fewer", tensors(layers=(0,))),
    ]
    digests = [read(path).digest for path in [*same, *other]]
    assert digests[0] == digests[1]
    assert len(set(digests[1:])) == 4


def test_files_of_two_dtypes_that_are_served_alike_are_one_content(tmp_path):
    narrow = {key: tensor.bfloat16() for key, tensor in tensors().items()}
    paths = [
        write_adapter(tmp_path / "narrow", narrow),
        write_adapter(tmp_path / "wide", {key: tensor.float() for key, tensor in narrow.items()}),
        write_adapter(tmp_path / "exact"),
    ]
    assert len({read(path, dtype=torch.bfloat16).digest for path in paths}) == 1
    assert len({read(path).digest for path in paths}) == 2


# --- refusals ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"peft_type": None}, "peft_type=None"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "some"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [-1]}, "alora_invocation_tokens"),
        ({"r": 0}, "r must be a positive integer"),
        ({"r": "8"}, "r must be a positive integer"),
        ({"lora_alpha": None}, "lora_alpha must be a positive number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a positive number"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"alpha_pattern": {"(": 4}}, "no regular expression"),
        ({"alpha_pattern": [4]}, "alpha_pattern must be an object"),
    ],
    ids=str,
)
def test_configurations_that_are_not_served(tmp_path, config, message):
    with pytest.raises(AdapterError, match=message.replace("(", r"\(")):
        read(write_adapter(tmp_path, **config))


@pytest.mark.parametrize("value", [True, False, "gaussian", "eva", "orthogonal"])
def test_initializations_that_leave_the_base_alone_are_served(tmp_path, value):
    assert read(write_adapter(tmp_path, init_lora_weights=value)).rows == 4


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding is not served"),
        ("base_model.model.model.embed_tokens.lora_A.weight", "embedding is not served"),
        ("base_model.model.lm_head.lora_A.weight", "lm_head is not served"),
        ("base_model.model.lm_head.weight", "lm_head is not served"),
        (f"base_model.model.{Q}.lora_magnitude_vector.weight", "no use without use_dora"),
        (f"base_model.model.{Q}.lora_B.bias", "no use without lora_bias"),
        (f"base_model.model.{Q}.base_layer.bias", "the configuration has bias='none'"),
        ("base_model.model.model.norm.bias", "served only for a linear module"),
        (f"base_model.model.{Q}.lora_C.weight", "no LoRA weight"),
        (f"base_model.model.{Q}.lora_A.other.weight", "two tensors for the same weight"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", r"no linear module 'model\.layers\.7"),
        ("base_model.model.model.layers.0.mlp.w1.lora_A.weight", r"base mismatch.*w1"),
    ],
)
def test_tensors_that_are_not_served(tmp_path, key, message):
    with pytest.raises(AdapterError, match=message):
        read(write_adapter(tmp_path, tensors() | {key: torch.zeros(4, 16)}))


def test_rank_above_the_limit(tmp_path):
    with pytest.raises(AdapterError, match=r"rank 16 exceeds the limit max_lora_rank=8"):
        read(write_adapter(tmp_path, rank=16))


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("A", (4, 17), r"lora_A is \[4, 17\], expected \[4, 16\]"),
        ("B", (15, 4), r"lora_B is \[15, 4\], expected \[16, 4\]"),
        ("A", (3, 16), r"lora_A is \[3, 16\], expected \[4, 16\]"),
        ("B", (16,), "must be matrices"),
        ("B", (16, 0), r"expected \[16, 4\]"),
    ],
)
def test_wrong_shapes_name_module_got_and_expected(tmp_path, part, shape, message):
    state = tensors() | {f"base_model.model.{Q}.lora_{part}.weight": torch.zeros(shape)}
    with pytest.raises(AdapterError, match=rf"{Q}.*{message}"):
        read(write_adapter(tmp_path, state))


def test_a_missing_half(tmp_path):
    state = tensors()
    del state[f"base_model.model.{Q}.lora_B.weight"]
    with pytest.raises(AdapterError, match=f"{Q}: lora_B is missing"):
        read(write_adapter(tmp_path, state))


def test_no_weights_at_all(tmp_path):
    with pytest.raises(AdapterError, match="no LoRA weights"):
        read(write_adapter(tmp_path, {}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e5])
def test_weights_that_are_not_finite_in_the_served_dtype(tmp_path, value):
    state = tensors()
    state[f"base_model.model.{Q}.lora_B.weight"][3, 1] = value
    with pytest.raises(AdapterError, match=f"{Q}: lora_B is not finite in float16"):
        read(write_adapter(tmp_path, state), dtype=torch.float16)


def test_finite_weights_whose_sum_is_not(tmp_path):
    """In float16: the sum is checked first."""
    state = {key: torch.full_like(tensor, 3e4 if "lora_A" in key else 1.0) for key, tensor in tensors().items()}
    adapter = read(write_adapter(tmp_path, state), dtype=torch.float16)
    assert not adapter.modules[Q].a.sum().isfinite()
    assert adapter.modules[Q].a.isfinite().all()


def test_integer_weights(tmp_path):
    state = tensors() | {f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 16, dtype=torch.int64)}
    with pytest.raises(AdapterError, match="dtype"):
        read(write_adapter(tmp_path, state))


def test_missing_files(tmp_path):
    with pytest.raises(AdapterError, match="does not exist") as caught:
        read(tmp_path / "nowhere")
    assert caught.value.status == 400
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors"):
        read(tmp_path)


def test_a_configuration_has_at_most_a_mebibyte(tmp_path):
    write_adapter(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().ljust(1 << 20))
    assert read(tmp_path).rows == 4
    file.write_text(file.read_text() + " ")
    with pytest.raises(AdapterError, match="1048576"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\ud800", '"r"'])
def test_a_broken_configuration(tmp_path, text):
    path = write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read(path)


class _Evil:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_pickle_that_runs_code(tmp_path, capsys):
    path = write_adapter(tmp_path, {"x": _Evil()}, binary=True)
    with pytest.raises(AdapterError, match=r"adapter_model\.bin of the adapter cannot be read"):
        read(path)
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize("state", [[torch.zeros(1)], {"x": 1}])
def test_a_bin_file_of_something_else(tmp_path, state):
    with pytest.raises(AdapterError, match="dictionary of tensors"):
        read(write_adapter(tmp_path, state, binary=True))


@settings(max_examples=40, database=None)
@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 255)), max_size=3))
def test_damaged_files_are_refused_or_read_as_something_finite(tmp_path_factory, cut, flips):
    folder = tmp_path_factory.mktemp("damaged")
    path = write_adapter(folder, rank=2)
    file = folder / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    for position, mask in flips:
        data[position % len(data)] ^= mask
    file.write_bytes(data[: len(data) - cut])
    try:
        adapter = read(path)
    except AdapterError:
        return
    assert cut == 0
    assert all(torch.isfinite(part).all() for weights in adapter.modules.values() for part in weights[:2])


def test_a_damaged_header_is_named(tmp_path):
    path = write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(AdapterError, match="not a valid safetensors file"):
        read(path)


def test_safetensors_go_before_bin(tmp_path):
    write_adapter(tmp_path, seed=1, binary=True)
    save_file(tensors(seed=2), tmp_path / "adapter_model.safetensors")
    assert read(tmp_path).digest == read(write_adapter(tmp_path / "other", seed=2)).digest


@pytest.mark.slow
def test_a_pattern_that_would_take_for_ever_is_given_up(tmp_path):
    path = write_adapter(tmp_path, rank_pattern={"(?:[a-z0-9_.]|[a-z0-9_.]{2})+_projx?[0-9]": 2})
    with pytest.raises(AdapterError, match="takes too long"):
        read(path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_is_not_read(tmp_path, name):
    path = write_adapter(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(AdapterError, match=f"{name} of the adapter is a named pipe"):
        read(path)


@pytest.mark.parametrize("path", ["nul\0nul", "x" * 5000])
def test_impossible_paths_are_refused_like_missing_ones(path):
    with pytest.raises(AdapterError, match="does not exist"):
        read(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"peft_type": "LORA", "r": 4, "lora_alpha": 1' + "0" * 400 + "}", " " * (1 << 21)]
)
def test_hostile_configs_are_refused(tmp_path, text):
    path = write_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError):
        read(path)
