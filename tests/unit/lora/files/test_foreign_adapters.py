"""Adapters of other tools: mlx-lm's are served, others refused with instructions to convert them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from outrider.platform.core.errors import AdapterError

from ..conftest import admitted, module, tensors, write_adapter

MLX = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}


def mlx_state(seed=0):
    """The tensors of `tensors`, as mlx-lm names and lays them out."""
    names = {"lora_A": "lora_a", "lora_B": "lora_b"}
    state = {}
    for key, tensor in tensors(4, seed=seed, prefix="").items():
        name, part, _ = key.rsplit(".", 2)
        state[f"{name}.{names[part]}"] = tensor.t().contiguous()
    return state


def write_mlx(folder, state=None, **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(mlx_state() if state is None else state, folder / "adapters.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**MLX, **config}))
    return str(folder)


def test_an_mlx_adapter_is_the_peft_adapter_with_its_scale(make_manager, tmp_path):
    manager = make_manager()
    peft = admitted(manager, "peft", write_adapter(tmp_path / "peft", lora_alpha=80), "1")
    mlx = admitted(manager, "mlx", write_mlx(tmp_path / "mlx"), "2")
    assert peft.adapter.digest == mlx.adapter.digest
    for request in (peft, mlx):
        manager.forget(request)


@pytest.mark.parametrize(
    ("state", "config", "message"),
    [
        ({}, {"fine_tune_type": "full"}, "fine_tune_type='full' of mlx-lm is no adapter"),
        ({}, {"lora_parameters": {"rank": 4}}, "must have the numbers rank and scale"),
        ({"model.layers.0.mlp.switch_mlp.up_proj.lora_a": torch.ones(2, 4, 16)}, {}, "adapters on experts"),
        ({"model.embed_tokens.lora_a": torch.ones(16, 4)}, {}, "adapters on embed_tokens"),
        ({f"{module(0, 'q_proj')}.lora_A.weight": torch.ones(4, 16)}, {}, "two tensors for the same weight"),
    ],
    ids=["full", "scale", "experts", "embeddings", "twice"],
)
def test_unsupported_mlx_options_are_refused(make_manager, tmp_path, state, config, message):
    with pytest.raises(AdapterError, match=message):
        admitted(make_manager(), "x", write_mlx(tmp_path / "x", mlx_state() | state, **config))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_0.pt", "torchtune's own format; its Hugging Face checkpointer"),
        ("model.nemo", "NeMo's own format; llm.export_ckpt"),
        ("weights/__0_0.distcp", "a distributed checkpoint"),
        ("lora-f16.gguf", "llama.cpp's format"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_files_of_other_tools_are_named(make_manager, tmp_path, file, message, config):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    if config:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    with pytest.raises(AdapterError, match=message):
        admitted(make_manager(), "x", str(tmp_path))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("layers.0.attn.q_proj.lora_a.weight", "torchtune's own names"),
        ("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", "NeMo's own names"),
    ],
)
def test_names_of_other_tools_are_named(make_manager, tmp_path, key, message):
    with pytest.raises(AdapterError, match=message):
        admitted(make_manager(), "x", write_adapter(tmp_path / "x", tensors() | {key: torch.ones(4, 16)}))


@pytest.mark.parametrize(
    ("prefix", "middle"),
    [
        ("base_model.model.", ".default"),  # Unsloth, LLaMA-Factory, axolotl and ms-swift save PEFT's own form
        ("base_model.model.", ".sft"),
        ("module.base_model.model.", ""),  # DDP
        ("base_model.model._orig_mod.", ""),  # torch.compile
        ("", ""),  # torchtune's PEFT export before its prefix
    ],
)
def test_prefixes_and_adapter_names(make_manager, tmp_path, prefix, middle):
    manager = make_manager()
    plain = admitted(manager, "plain", write_adapter(tmp_path / "plain"), "1")
    wrapped = admitted(manager, "wrapped", write_adapter(tmp_path / "x", tensors(prefix=prefix, middle=middle)), "2")
    assert plain.adapter.digest == wrapped.adapter.digest
    for request in (plain, wrapped):
        manager.forget(request)


@pytest.mark.parametrize("count", [1, 2, 60])
def test_the_first_unexpected_tensor_is_named_and_the_others_counted(make_manager, tmp_path, count):
    extra = {f"base_model.model.model.layers.{i}.mlp.gate.lora_A.weight": torch.ones(4, 16) for i in range(count)}
    with pytest.raises(AdapterError, match="has no linear module") as found:
        admitted(make_manager(), "x", write_adapter(tmp_path / "x", tensors() | extra))
    assert sum(key in found.value.message for key in extra) == 1
    more = f", and {count - 1} more tensors of the file have no place"
    assert found.value.message.endswith(more if count > 1 else ".mlp.gate.lora_A.weight)")


def test_the_first_module_of_a_wrong_shape_is_named_and_the_others_counted(make_manager, tmp_path):
    wrong = {key: tensor[:, :-1].contiguous() if "lora_A" in key else tensor for key, tensor in tensors().items()}
    num_modules = sum("lora_A" in key for key in wrong)
    with pytest.raises(AdapterError, match="mismatch or wrong shape: lora_A") as found:
        admitted(make_manager(), "x", write_adapter(tmp_path / "x", wrong))
    assert found.value.message.endswith(f", and {num_modules - 1} more modules do not fit")
