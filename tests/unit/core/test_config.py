"""`resolve`: defaults, limits, and incompatible options."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.platform.core.config import EngineArgs, Hardware, ModelFacts, resolve
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.speculative_config import parse_speculative

FACTS = ModelFacts(
    path="/m",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    vocab_size=100,
    max_position_embeddings=1024,
    kv_bytes_per_token=1024,
)
CPU = Hardware(device="cpu", free_memory_bytes=1 << 30, total_memory_bytes=1 << 30)
GPU = Hardware(device="cuda", free_memory_bytes=60 << 30, total_memory_bytes=80 << 30)


def test_defaults_follow_the_model():
    config = resolve(EngineArgs(), FACTS, CPU)
    assert (config.dtype, config.scheduler.max_model_len, config.lora, config.speculative) == (
        "bfloat16",
        1024,
        None,
        None,
    )


def test_no_more_blocks_than_the_sequences_can_use():
    config = resolve(EngineArgs(max_num_seqs=2), FACTS, CPU)
    assert config.cache.num_blocks == 3 * 1024 // 16


def test_blocks_follow_the_memory():
    config = resolve(EngineArgs(kv_cache_memory_bytes=2048 * 1024), FACTS, CPU)
    assert config.cache.num_blocks == 128


@pytest.mark.parametrize(("eager", "gib"), [(True, 60 - 20 - 1), (False, 60 - 20 - 1.5)])
def test_a_gpus_cache_leaves_room_for_other_processes_activations_and_graphs(eager, gib):
    config = resolve(EngineArgs(gpu_memory_utilization=0.75, max_num_seqs=100_000, enforce_eager=eager), FACTS, GPU)
    assert config.cache.num_blocks * 16 * 1024 == gib * (1 << 30)


@pytest.mark.parametrize(("hardware", "default"), [(CPU, False), (GPU, True)])
def test_steps_overlap_on_a_gpu_by_default(hardware, default):
    assert resolve(EngineArgs(), FACTS, hardware).async_scheduling is default
    for wanted in (False, True):
        assert resolve(EngineArgs(async_scheduling=wanted), FACTS, hardware).async_scheduling is wanted


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"load_format": "gguf"}, "load_format"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"max_model_len": 2048}, "max_model_len"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"block_size": "16"}, "block_size"),
        ({"kv_cache_memory_bytes": 1024}, "max_model_len"),
        ({"num_gpu_blocks_override": 8}, "num_gpu_blocks_override"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"max_logprobs": -2}, "max_logprobs"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_num_batched_tokens": 2**70}, "max_num_batched_tokens"),
        ({"enable_lora": "yes"}, "enable_lora"),
        ({"async_scheduling": "auto"}, "async_scheduling"),
        ({"model": 5}, "model"),
        ({"tensor_parallel_size": "1"}, "tensor_parallel_size"),
        ({"speculative_config": "ngram"}, "speculative_config"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "distributed_executor_backend"),
        ({"tensor_parallel_size": 2, "model_impl": "transformers"}, "model_impl"),
        ({"tensor_parallel_size": 2, "async_scheduling": True}, "async_scheduling"),
        ({"distributed_executor_backend": "torchrun"}, "distributed_executor_backend"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 128},
            "max_num_batched_tokens",
        ),
    ],
)
def test_wrong_options_are_named(options, param):
    with pytest.raises(InvalidRequestError) as caught:
        resolve(EngineArgs(**options), FACTS, CPU)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_an_fp8_cache_needs_a_device_that_reads_it(name):
    old = dataclasses.replace(GPU, has_float8=False)
    assert resolve(EngineArgs(), FACTS, old).cache.dtype == "auto"
    assert resolve(EngineArgs(kv_cache_dtype=name), FACTS, GPU).cache.dtype == "fp8"
    with pytest.raises(InvalidRequestError, match=r"8\.9") as caught:
        resolve(EngineArgs(kv_cache_dtype=name), FACTS, old)
    assert caught.value.param == "kv_cache_dtype"


@pytest.mark.parametrize(
    "config",
    [
        {"method": "oracle"},
        {"num_speculative_tokens": 3},
        {"method": "ngram", "k": 3},
        {"method": "draft_model"},
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "num_speculative_tokens": True},
        {"method": "ngram", "prompt_lookup_max": "3"},
        {"method": "ngram", "rejection_sample_method": "fast"},
        {"method": "ngram", "rejection_sample_method": ["standard"]},
        {"method": "off", "k": 3},
        {"method": ["ngram"]},
        {"method": "draft_model", "model": 5},
        {1: 2, "method": "ngram"},
        {None: 3, "method": "ngram"},
        "ngram",
        ["ngram"],
    ],
)
def test_wrong_speculative_configs_are_refused(config):
    with pytest.raises(InvalidRequestError) as caught:
        parse_speculative(config)
    assert caught.value.param == "speculative_config"


def test_lookup_bounds_that_cross_are_both_named():
    with pytest.raises(InvalidRequestError, match=r"prompt_lookup_min 9.*prompt_lookup_max 2"):
        parse_speculative({"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 2})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"method": "ngram", "model": "/d"}, "model"),
        ({"method": "mtp", "revision": "main"}, "revision"),
        ({"method": "ngram", "drafts_given": True}, "drafts_given"),
        ({"model": "/d", "prompt_lookup_max": 3, "num_speculative_tokens": 4}, "prompt_lookup_max .* unless"),
        ({"method": "draft_model", "model": "/d", "prompt_lookup_min": 1, "adaptive": False}, "prompt_lookup_min"),
        ({"method": "suffix", "group_drafts": "prompt"}, "group_drafts"),
        ({"model": "/d", "group_max_tokens": 9, "num_speculative_tokens": 4}, "group_max_tokens .* unless"),
    ],
)
def test_fields_of_another_method_are_not_ignored(config, field):
    with pytest.raises(InvalidRequestError, match=field):
        parse_speculative(config)


def test_heads_in_the_target_need_no_model():
    for method in ("mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "ernie_mtp", "mimo_mtp"):
        config = parse_speculative({"method": method, "num_speculative_tokens": 2})
        assert (config.method, config.model, config.adaptive) == ("mtp", None, False)
    assert parse_speculative({"method": "mtp", "model": "/d"}).model == "/d"
    assert parse_speculative({"method": "mtp"}).adaptive


def test_uno_takes_the_names_of_vllm():
    config = parse_speculative({"method": "uno", "uno_lora_path": "/d", "uno_mask_token_id": 151669})
    assert (config.model, config.uno_mask_token_id) == ("/d", 151669)
    assert (config.num_speculative_tokens, config.adaptive) == (8, True)
    for given, words in (
        ({}, "uno needs a model"),
        ({"model": "/d", "uno_mask_token_id": 1}, "uno_mask_token_id must be .*2"),
        ({"model": "/d", "quantization": "int8"}, "quantization means nothing to method uno"),
        ({"model": "/d", "uno_lora_path": "/d"}, "unknown field 'uno_lora_path'"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            parse_speculative({"method": "uno", **given})
    with pytest.raises(InvalidRequestError, match="uno_mask_token_id means nothing to method dflash"):
        parse_speculative({"method": "dflash", "model": "/d", "uno_mask_token_id": 9})


def test_the_bounds_of_prompt_lookup_go_with_the_fallback_of_adaptive_drafters():
    config = parse_speculative({"method": "eagle3", "model": "/d", "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    assert (config.prompt_lookup_min, config.prompt_lookup_max, config.adaptive) == (2, 4, True)
    said = {"model": "/d", "num_speculative_tokens": 2, "adaptive": True, "prompt_lookup_min": 3}
    assert parse_speculative(said).prompt_lookup_min == 3


def test_group_drafts_and_their_memory():
    config = parse_speculative({"method": "ngram"})
    assert (config.group_drafts, config.group_max_tokens) == ("request", 131_072)
    head = parse_speculative({"method": "eagle3", "model": "/d", "group_drafts": "prompt", "group_max_tokens": 2**24})
    assert (head.group_drafts, head.group_max_tokens) == ("prompt", 2**24)
    for field, value, words in (
        ("group_max_tokens", 2**24 + 1, "group_max_tokens must be .*16777216"),
        ("group_max_tokens", 0, "group_max_tokens must be .*1"),
        ("group_drafts", "tenant", "group_drafts must be one of off, request, prompt"),
        ("group_drafts", True, "group_drafts must be one of"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            parse_speculative({"method": "ngram", field: value})


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_batch_invariance_is_an_option_of_both_devices(machine, cache):
    """Models without such kernels on a GPU are refused when they are built."""
    assert resolve(EngineArgs(batch_invariant=True, kv_cache_dtype=cache), FACTS, machine).batch_invariant


def test_speculative_defaults():
    assert parse_speculative(None) is None
    assert parse_speculative({"method": "off"}) is None
    assert parse_speculative({"model": "/d"}).method == "draft_model"
    ngram = parse_speculative({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "model": None})
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max, ngram.num_speculative_tokens) == (2, 4, 16)
    fixed = parse_speculative({"method": "ngram", "adaptive": False})
    assert fixed.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("config", "adaptive"),
    [
        ({"method": "ngram"}, True),
        ({"method": "ngram", "num_speculative_tokens": 4}, False),
        ({"method": "ngram", "num_speculative_tokens": 4, "adaptive": True}, True),
        ({"method": "ngram", "adaptive": False}, False),
        ({"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.2]}, False),
    ],
)
def test_a_number_of_drafts_that_is_given_is_fixed(config, adaptive):
    assert parse_speculative(config).adaptive is adaptive


def test_without_chunked_prefill_a_prompt_must_fit_one_step():
    """Also when max_model_len comes from the model; without a number the step is made large enough."""
    with pytest.raises(InvalidRequestError, match=r"max_num_batched_tokens 512.*max_model_len 1024"):
        resolve(EngineArgs(enable_chunked_prefill=False, max_num_batched_tokens=512), FACTS, CPU)
    long = dataclasses.replace(FACTS, max_position_embeddings=4096)
    config = resolve(EngineArgs(enable_chunked_prefill=False), long, CPU)
    assert config.scheduler.max_num_batched_tokens == 4096
