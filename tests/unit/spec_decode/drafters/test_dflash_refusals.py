"""DFlash and DSpark drafters that do not fit, or have options that are not served, are refused with both figures."""

import dataclasses
import json

import pytest
import torch

from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters.dflash.config import dflash_kv_bytes_per_token, read_dflash_config
from outrider.spec_decode.drafters.factory import draft_kv_bytes_per_token

from ....block_heads import BlockHead


@pytest.fixture
def refused(target, load_head, tmp_path):
    """refused(method, config changes, tensor changes, options...) -> the message of the error of loading it."""

    def refused(method, config=None, tensors=None, loaded_as=None, speculative=None, **options) -> str:
        head, path = BlockHead(target, method, **options), tmp_path / "changed"
        head.weights |= {n: t for n, t in (tensors or {}).items() if t is not None}
        for name in [n for n, t in (tensors or {}).items() if t is None]:
            del head.weights[name]
        head.save(path)
        raw = json.loads((path / "config.json").read_text()) | (config or {})
        raw["dflash_config"] = raw.get("dflash_config", {}) | raw.pop("inner", {})
        (path / "config.json").write_text(json.dumps({n: v for n, v in raw.items() if v is not None}))
        with pytest.raises((InvalidRequestError, UnsupportedModelError)) as caught:
            load_head(path, loaded_as or method, **(speculative or {}))
        assert caught.value.param == "speculative_config"
        assert caught.value.message.startswith("speculative_config: ")
        assert str(path) in caught.value.message
        return caught.value.message

    return refused


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        ("dflash", {"hidden_size": 24}, ("24", "32")),
        ("dflash", {"target_hidden_size": 48}, ("48", "32")),
        ("dflash", {"vocab_size": 100}, ("100", "97")),
        ("dflash", {"draft_vocab_size": 200}, ("200", "97")),
        ("dflash", {"num_target_layers": 36}, ("36", "5 layers")),
        ("dflash", {"inner": {"target_layer_ids": [1, 5]}}, ("[1, 5]", "5 layers")),
        ("dflash", {"inner": {"target_layer_ids": [-2]}}, ("[-2]", "5 layers")),
        ("dflash", {"inner": {"target_layer_ids": None}}, ("target_layer_ids", "None")),
        ("dflash", {"inner": {"target_layer_ids": [1] * 7}}, ("target_layer_ids", "1 to 6 layers", "7 of them")),
        ("dflash", {"inner": {"sample_from_anchor": "false"}}, ("sample_from_anchor must be true or false", "'false'")),
        ("dflash", {"inner": {"is_causal": "no"}}, ("is_causal must be true or false", "'no'")),
        ("dspark", {"enable_confidence_head": 1}, ("enable_confidence_head must be true or false", "1")),
        ("dflash", {"inner": {"mask_token_id": 97}}, ("97", "97 tokens")),
        ("dflash", {"inner": {"mask_token_id": None}}, ("mask_token_id", "None")),
        ("dflash", {"block_size": 1}, ("block_size", "1")),
        ("dflash", {"block_size": "many"}, ("'many'",)),
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, ("DFlash2DraftModel", "DFlashDraftModel")),
        ("dflash", {"architectures": ["DSparkDraftModel"]}, ("use method 'dspark'",)),
        ("dflash", {"markov_rank": 4}, ("markov_rank", "use method 'dspark'")),
        ("dspark", {"markov_rank": 0}, ("markov_rank", "use method 'dflash'")),
        ("dspark", {"markov_head_type": "fir"}, ("'fir'", "vanilla, gated, rnn")),
        ("dflash", {"speculators_model_type": "dspark"}, ("'dspark'", "use method 'dspark'")),
        ("dflash", {"speculators_model_type": "eagle3"}, ("'eagle3'", "'dflash'")),
        ("dflash", {"projector_type": "domino"}, ("projector_type 'domino'",)),
        ("dflash", {"inner": {"shift_label": True}}, ("shift_label True",)),
        ("dflash", {"inner": {"output_multiplier": 2.0}}, ("output_multiplier 2.0",)),
        ("dflash", {"inner": {"attention_sink_bias": True}}, ("attention_sink_bias True",)),
        ("dflash", {"layer_types": ["sliding_attention"] * 2}, ("sliding_window", "None")),
        ("dflash", {"layer_types": ["full_attention"]}, ("layer_types", "2 kinds")),
        ("dflash", {"layer_types": ["full_attention", "linear_attention"]}, ("linear_attention",)),
        (
            "dflash",
            {"inner": {"use_swa": True, "swa_window_size": 9, "causal": False}},
            ("use_swa", "causal", "not served"),
        ),
        ("dflash", {"rope_scaling": {"rope_type": "longrope"}}, ("longrope",)),
        ("dflash", {"dflash_config": 3}, ("dflash_config",)),
    ],
)
def test_config_that_does_not_fit(refused, method, config, words):
    if config.get("dflash_config") == 3:
        with pytest.raises(InvalidRequestError, match="dflash_config"):
            read_dflash_config({"dflash_config": 3}, method, None)  # type: ignore[arg-type]
        return
    if "longrope" in words:
        config = {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}
        config |= {"original_max_position_embeddings": 64}
    message = refused(method, config)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("method", "tensors", "words"),
    [
        ("dflash", {"fc.weight": torch.zeros(32, 96)}, ("fc.weight", "[32, 96]", "[32, 64]")),
        ("dflash", {"hidden_norm.weight": None}, ("missing: hidden_norm.weight",)),
        ("dflash", {"layers.1.self_attn.k_norm.weight": None}, ("model.layers.1.self_attn.k_norm.weight",)),
        ("dflash", {"layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}, ("model.layers.2.mlp.up_proj.weight",)),
        ("dspark", {"markov_head.markov_w2.weight": None}, ("markov_head.markov_w2.weight",)),
        ("dspark", {"markov_head.markov_w1.weight": torch.zeros(90, 6)}, ("[90, 6]", "[97, 6]")),
    ],
)
def test_tensors_that_do_not_fit(refused, method, tensors, words):
    message = refused(method, tensors=tensors)
    for word in words:
        assert word in message


def test_a_target_with_scaled_embeddings(target, decoder):
    scaled = dataclasses.replace(decoder.config, embedding_scale=5.5)
    with pytest.raises(InvalidRequestError, match="scaled by 5"):
        read_dflash_config(BlockHead(target).config(), "dflash", scaled)


def test_more_drafts_than_a_block_makes(refused):
    assert "num_speculative_tokens is 5" in (m := refused("dflash", speculative={"num_speculative_tokens": 5}))
    assert "4 drafts (block_size 5)" in m
    assert "makes 5 drafts" in refused("dspark", speculative={"num_speculative_tokens": 6})


def test_a_mask_embedding_of_another_size_or_a_damaged_one(target, load_head, tmp_path):
    head = BlockHead(target)
    path = head.save(tmp_path / "head")
    for content, words in (
        (torch.zeros(33), "33 elements.* 32"),
        ({"mask_token_id": 3}, "must hold one tensor, got 0"),
        (torch.ones(32).to_sparse(), "must hold a dense tensor"),
        ([torch.zeros(2), print], "more than tensors"),
    ):
        torch.save(content, path / "mask_embedding.pt")
        with pytest.raises(InvalidRequestError, match=words):
            load_head(path, "dflash")


def test_names_of_models_show_the_method():
    for model, method in {
        "z-lab/Qwen3-8B-DFlash-b16": "dflash",
        "deepseek-ai/dspark_qwen3_4b_block7": "dspark",
    }.items():
        config = parse_speculative({"model": model})
        assert (config.method, config.num_speculative_tokens, config.adaptive) == (method, 15, True)


@pytest.mark.parametrize(("options", "layers"), [({}, 2), ({"speculators": True, "layers": 3}, 3)])
def test_kv_bytes_are_known_from_the_config_alone(target, load_head, tmp_path, options, layers):
    path = BlockHead(target, **options).save(tmp_path / "head")
    drafter = load_head(path, "dflash")
    assert len(drafter.needs.kv_layers) == layers
    (path / "model.safetensors").unlink()
    config = parse_speculative({"method": "dflash", "model": str(path)})
    elements = sum(spec.num_elements for spec in drafter.needs.kv_layers)
    assert draft_kv_bytes_per_token(config, "float32") == 4 * elements == layers * 2 * 2 * 8 * 4
    assert dflash_kv_bytes_per_token(path, "bfloat16", "fp8") == elements


@pytest.mark.parametrize("options", [{}, {"hidden": 24, "own_embedding": True, "draft_vocab": 50, "speculators": True}])
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_random_weights_need_no_files(target, load_head, tmp_path, method, options):
    from ..schedules import Engine

    path = BlockHead(target, method, **options).save(tmp_path / "head")
    (path / "model.safetensors").unlink()
    engine = Engine(target, load_head(path, method, load_format="dummy"))
    (drafts,) = engine.step((engine.sequence(6), 3, None, 0))
    assert len(drafts.token_ids) == 3
