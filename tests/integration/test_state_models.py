"""Models with recurrent state: grammars whose masks come late, later turns, sleep, and what is refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.models.checkpoint.loader import read_facts
from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError

from ..tiny_families import FAMILIES, OLMO_HYBRID, Family, build
from .test_grammar_drafts import late_at_random, requests

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny LFM2 with the demo model's tokenizer."""
    path = tmp_path_factory.mktemp("lfm2")
    build(Family("Lfm2", {**FAMILIES["lfm2"].config, "vocab_size": 2048})).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, path)
    return path


def texts(folder, drafter, *, limit=None):
    with LLM(str(folder), max_model_len=128, speculative_config=drafter, async_scheduling=limit is not None) as llm:
        prompts, params, _ = requests()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


def test_late_masks_and_drafts_of_grammars_change_no_token(monkeypatch, folder):
    """A row whose mask is late is computed again from the state that it started with."""
    expected = texts(folder, None)
    for share in (0.0, 0.4):
        late_at_random(monkeypatch, share)
        for k in (2, 4):
            drafter = {"method": "suffix", "num_speculative_tokens": k, "adaptive": False}
            assert texts(folder, drafter) == expected
        assert texts(folder, None) == expected
        assert texts(folder, None, limit=1) == expected


def test_the_next_turn_starts_at_the_last_full_block(folder):
    with LLM(str(folder), max_model_len=128, block_size=8, enable_prefix_caching=True) as llm:
        prompt = list(range(5, 42))
        first = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        turn = [*prompt, *first, 7, 8]
        outputs = llm.generate([{"prompt_token_ids": turn}, {"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [56, 32]
        assert outputs[1].outputs[0].token_ids == first
        llm.reset_prefix_cache()
        again = llm.generate({"prompt_token_ids": turn}, GREEDY, use_tqdm=False)[0]
        assert (again.num_cached_tokens, again.outputs[0].token_ids) == (0, outputs[0].outputs[0].token_ids)
        llm.sleep(level=1)
        llm.wake_up()
        assert llm.generate({"prompt_token_ids": turn}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == (
            outputs[0].outputs[0].token_ids
        )


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"batch_invariant": True}, "batch_invariant", "recurrent"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size", "does not divide"),
        ({"kv_cache_memory_bytes": 20_000, "max_num_seqs": 30}, "max_num_seqs", "lower max_num_seqs"),
        ({"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}}, "speculative_config", "draft"),
    ],
)
def test_refusals(folder, options, param, message):
    if "speculative_config" in options:
        options["speculative_config"]["model"] = str(folder)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        LLM(str(folder), max_model_len=64, **options)
    assert caught.value.param == param


def test_a_model_without_attention_is_refused(folder, tmp_path):
    raw = json.loads((folder / "config.json").read_text())
    for changes, param in (({"layer_types": ["conv"] * 3}, "layer_types"), ({"conv_L_cache": 1}, "conv_L_cache")):
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        with pytest.raises(UnsupportedModelError) as caught:
            read_facts(tmp_path)
        assert caught.value.param == param


def test_max_num_seqs_is_limited_by_state_memory(folder):
    facts = read_facts(folder)
    assert facts.state_bytes == 2 * 2 * 48 * torch.float32.itemsize
    with LLM(str(folder), max_model_len=64, kv_cache_memory_bytes=100_000) as llm:
        assert 1 < llm.llm_engine.engine_core.scheduler.config.max_num_seqs < 64
        outputs = llm.generate([{"prompt_token_ids": [5] * n} for n in range(1, 40)], GREEDY, use_tqdm=False)
        assert len(outputs) == 39


def test_filters_of_values_that_are_wider_than_keys(tmp_path):
    """OLMo Hybrid's filters as its published files have them, and as one tensor, which is transformers' own form.
    transformers 5.24 writes three parts of the same width, which are refused by their shapes."""
    from safetensors.torch import load_file, save_file

    model = build(Family("OlmoHybrid", OLMO_HYBRID | {"linear_value_head_dim": 24}))
    model.save_pretrained(tmp_path)
    prompt, file = list(range(5, 60)), tmp_path / "model.safetensors"
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
    )
    with pytest.raises(InvalidRequestError, match=r"v_conv1d.weight \[58, 1, 4\] instead of \[96, 1, 4\]"):
        LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=128)
    tensors = {name: tensor for name, tensor in load_file(file).items() if "conv1d" not in name}
    merged = {name: tensor for name, tensor in model.state_dict().items() if "conv1d" in name}
    parts = {
        name.replace("conv1d", f"{part}_conv1d"): piece.contiguous()
        for name, tensor in merged.items()
        for part, piece in zip("qkv", tensor.split([40, 40, 96]), strict=True)
    }
    for filters in (parts, merged):
        save_file(tensors | filters, file, {"format": "pt"})
        with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=128) as llm:
            output = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert output == expected[0, len(prompt) :].tolist()
