"""Broken or unfit models, adapters and drafters give one line that names the option."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from outrider.platform.core.errors import AdapterError, InvalidRequestError, OutriderError, UnsupportedModelError
from outrider.spec_decode.training.build import new_drafter, read_head
from outrider.spec_decode.training.methods.eagle_head import Eagle1Head
from outrider.spec_decode.training.run import load
from outrider.spec_decode.training.run_folder import RUN_FILE, check_output, prepare_output
from outrider.spec_decode.training.target import load_causal_lm, load_target

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def make_copy(folders, tmp_path):
    def copy(name):
        return Path(shutil.copytree(getattr(folders, name), tmp_path / name))

    return copy


def edit(file, **changes):
    """Change a JSON object; None takes a key out."""
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def check_line(caught, param):
    assert "\n" not in caught.value.message
    assert f"--{param}" in caught.value.message
    assert caught.value.param == param


@pytest.mark.parametrize("option", ["model", "draft"])
def test_a_model_that_was_cut_off(option, make_copy):
    folder = make_copy("draft")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(UnsupportedModelError) as caught:
        load_causal_lm(str(folder), torch.float32, CPU, option)
    check_line(caught, option)


BROKEN_ADAPTERS = {
    "weights": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"xx"),
    "a list": lambda folder: (folder / "adapter_config.json").write_text("[]"),
    "no JSON": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "no config": lambda folder: (folder / "adapter_config.json").unlink(),
    "rank": lambda folder: edit(folder / "adapter_config.json", r="x"),
    "type": lambda folder: edit(folder / "adapter_config.json", peft_type=None),
    "modules": lambda folder: edit(folder / "adapter_config.json", target_modules=["nothing"]),
}


@pytest.mark.parametrize("what", BROKEN_ADAPTERS)
def test_broken_adapters(what, folders, make_copy):
    folder = make_copy("adapter")
    BROKEN_ADAPTERS[what](folder)
    with pytest.raises(AdapterError) as caught:
        load_target(folders.target, str(folder), torch.float32, CPU)
    check_line(caught, "adapter")


def test_no_hub_is_asked_for_an_adapter_without_weights(folders, make_copy, monkeypatch):
    import peft

    monkeypatch.setattr(peft.PeftModel, "from_pretrained", lambda *_, **__: pytest.fail("PEFT would ask a hub"))
    folder = make_copy("adapter")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_model\.safetensors or adapter_model\.bin"):
        load_target(folders.target, str(folder), torch.float32, CPU)


@pytest.fixture
def trained(options, samples, read_batch, tmp_path):
    """A head's folder, and the target that it is for."""
    target, _ = read_batch(samples[:1])
    folder = tmp_path / "head"
    folder.mkdir()
    new_drafter(options(), target, samples).export(folder)
    return folder, target


BROKEN_HEADS = {
    "no hidden_size": {"hidden_size": None},
    "hidden_size": {"hidden_size": "x"},
    "heads": {"num_attention_heads": 0},
    "architectures": {"architectures": [5]},
    "vocabulary": {"vocab_size": []},
    "layers": {"eagle_aux_hidden_state_layer_ids": "x"},
    "two layers": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    "no such layers": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
    "nested": {"transformer_layer_config": []},
    "eps": {"rms_norm_eps": "x"},
    "draft vocabulary": {"draft_vocab_size": "x"},
    "target size": {"target_hidden_size": [1]},
    "window": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
}


@pytest.mark.parametrize("what", BROKEN_HEADS)
def test_broken_heads(what, options, trained):
    folder, _ = trained
    edit(folder / "config.json", **BROKEN_HEADS[what])
    with pytest.raises(InvalidRequestError) as caught:
        load(options("draft-lora", draft=str(folder)))
    check_line(caught, "draft")


@pytest.mark.parametrize("text", ["[]", "{", "[" * 9999])
def test_a_heads_config_that_is_no_object(text, options, trained):
    (trained[0] / "config.json").write_text(text)
    with pytest.raises(OutriderError) as caught:
        load(options("draft-lora", draft=str(trained[0])))
    check_line(caught, "draft")


def test_a_heads_weights_that_are_none(options, trained):
    (trained[0] / "model.safetensors").write_bytes(b"xx")
    with pytest.raises(OutriderError) as caught:
        load(options("draft-lora", draft=str(trained[0])))
    check_line(caught, "draft")


SCALED = [
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("rope", SCALED)
def test_a_scaled_rotary_embedding_is_refused(rope, nested, options, trained):
    """Training computes something else: the draft weights would be for another head."""
    folder, target = trained
    edit(folder / "config.json", **({"transformer_layer_config": rope} if nested else rope))
    with pytest.raises(InvalidRequestError, match=r"rope_\w+ of type '(linear|llama3)'"):
        new_drafter(options("draft-lora", draft=str(folder)), target, [])


def test_a_plain_rotary_embedding_is_read(options, trained):
    plain = {"rope_type": "default", "rope_theta": 5000.0}
    edit(trained[0] / "config.json", rope_parameters=plain, rope_scaling=None)
    assert read_head(options("draft-lora", draft=str(trained[0]))).config.layer.rope.theta == 5000.0


def test_a_draft_model_has_no_unroll(options, samples, read_batch, folders):
    target, _ = read_batch(samples[:1], ())
    with pytest.raises(InvalidRequestError, match="--unroll is for heads"):
        new_drafter(options("draft-lora", draft=folders.draft, unroll=2), target, [])


@pytest.mark.parametrize(
    ("method", "random"), [("eagle3", "layers.0.self_attn.q_proj.weight"), ("dflash", "layers.0.mlp.up_proj.weight")]
)
def test_a_head_is_trained_further_from_its_weights(method, random, options, samples, read_batch, tmp_path):
    target, _ = read_batch(samples[:1], None)
    first = new_drafter(options(method), target, samples)
    first.export(tmp_path)
    again = new_drafter(options(method, draft=str(tmp_path), seed=5), target, samples)
    written, read = first.state(), again.state()
    assert read.keys() == written.keys()
    assert all(torch.allclose(read[name], written[name], atol=0.002) for name in written)  # rounded in files
    assert not torch.allclose(
        new_drafter(options(method, seed=5), target, samples).state()[random], read[random], atol=0.002
    )


def test_a_run_of_an_older_version_goes_on_with_the_defaults_of_later_options(options, tmp_path):
    chosen = options(output=str(tmp_path / "out"))
    prepare_output(chosen)
    described = json.loads((tmp_path / "out" / RUN_FILE).read_text())
    assert described.pop("unroll_every") == 1
    (tmp_path / "out" / RUN_FILE).write_text(json.dumps(described))
    (tmp_path / "out" / "model.safetensors").touch()
    check_output(dataclasses.replace(chosen, resume=True))
    with pytest.raises(InvalidRequestError, match="had unroll_every 1, this one has 2"):
        check_output(dataclasses.replace(chosen, resume=True, unroll_every=2))


def test_an_eagle_head_is_unrolled_once_by_default(options, samples, read_batch, tmp_path, monkeypatch):
    """A new one, and one that is trained further."""
    seen = []
    steps = Eagle1Head.steps
    monkeypatch.setattr(Eagle1Head, "steps", lambda head, features, n: seen.append(n) or steps(head, features, n))
    target, features = read_batch(samples[:2], ())
    drafter = new_drafter(options("eagle", unroll=None), target, samples)
    drafter.export(tmp_path)
    for each in (drafter, new_drafter(options("eagle", unroll=None, draft=str(tmp_path)), target, samples)):
        each.train().loss(features)
    assert seen == [1, 1]


def test_only_a_head_of_the_method_is_trained_further(options, trained, samples, folders):
    for method, draft in (("eagle3", folders.draft), ("eagle", str(trained[0]))):
        with pytest.raises(InvalidRequestError, match=f"is not a head that --method {method} can train further"):
            new_drafter(options(method, draft=draft), trained[1], samples)
    with pytest.raises(InvalidRequestError, match="--draft-vocab-size is for a new head"):
        options(draft=str(trained[0]), draft_vocab_size=64)


BLOCK_VARIANTS = {
    "causal": ({"dflash_config": {"causal": True}}, "causal layers"),
    "rotation": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
    "biases": ({"attention_bias": True}, "qkv_bias"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    "markov": ({"markov_head_type": "rnn"}, "kind 'rnn'"),
    "mask": ({}, "mask_embedding.pt"),
    "too large": ({"hidden_size": 64}, "--draft: .*hidden_size is 64"),
    "unroll": ({}, "--unroll is for heads that draft token by token"),
}


@pytest.mark.parametrize("what", BLOCK_VARIANTS)
def test_variants_of_drafters_of_blocks(what, options, samples, read_batch, tmp_path):
    """Variants whose training would compute something else than the engine are refused by name."""
    target, _ = read_batch(samples[:1], None)
    new_drafter(options("dspark", draft_layers=1, markov_rank=4), target, samples).export(tmp_path)
    changes, words = BLOCK_VARIANTS[what]
    inner = json.loads((tmp_path / "config.json").read_text())["dflash_config"] | changes.get("dflash_config", {})
    edit(tmp_path / "config.json", **changes | {"dflash_config": inner})
    if what == "mask":
        (tmp_path / what).with_name("mask_embedding.pt").touch()
    with pytest.raises(InvalidRequestError, match=words):
        load(options("draft-lora", draft=str(tmp_path), unroll=3 if what == "unroll" else None))
