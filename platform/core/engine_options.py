"""Options of an engine, with the names that vLLM's users know: `EngineArgs` joins these classes.

A field is the whole declaration of an option: name, type, default, help text, choices and bounds. A class is a group of
`outrider serve --help` and of `docs/reference/options.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .kv_events import MAX_RANK
from .option import option
from .sampling_params import MAX_SEED
from .sizes import parse_bytes, parse_length, parse_memory


@dataclass(kw_only=True)
class ModelOptions:
    """Model."""

    model: str | None = option(None, "HF directory or hub id (default: the embedded demo model)")
    revision: str | None = option(None, "branch, tag or commit of the hub id")
    tokenizer: str | None = option(None, "HF directory or hub id of the tokenizer (default: the model's)")
    tokenizer_revision: str | None = option(
        None, "branch, tag or commit of the tokenizer's hub id (default: revision, if it is the model's)"
    )
    skip_tokenizer_init: bool = option(
        False, "load no tokenizer: prompts are token ids, and answers have token ids and no text"
    )
    download_dir: str | None = option(None, "folder of the hub's cache (default: that of the hub's library)")
    served_model_name: str | None = option(None, "name of the model in outputs and in the API (default: from MODEL)")
    generation_config: str = option(
        "auto",
        "sampling parameters of requests that leave them out: auto takes those of the model's (and an adapter's) "
        "generation_config.json, none (or vllm) takes none, a path those of that folder or file",
    )
    override_generation_config: dict[str, Any] | None = option(
        None, 'such parameters, which take precedence over those of files, as in {"temperature": 0.6}'
    )
    dtype: str = option(
        "auto",
        "type of weights and activations; auto takes the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "device; auto takes a GPU if there is one", choices=("auto", "cpu", "cuda"))
    load_format: str = option(
        "auto", "dummy fills the model with random weights, for benchmarks", choices=("auto", "dummy")
    )
    quantization: str | None = option(
        None,
        "int8, int4 or fp8: quantise the weights of a full-precision checkpoint while they are loaded (default: as "
        "they are stored; the method of a quantised checkpoint, such as gptq, need not be given)",
    )
    model_impl: str = option(
        "auto",
        "code that computes the model: native, transformers (its modelling code over this engine's cache and linear "
        "layers), or auto, which is native if there is a family for the architecture",
        choices=("auto", "native", "transformers"),
    )
    max_model_len: int | None = option(
        None,
        "longest sequence, prompt and output together, in tokens, also as 4k (4000) or 4K (4096); auto or -1: the "
        "model's limit (default: auto)",
        parse=parse_length,
    )
    seed: int = option(0, "seed of requests without one", within=(-MAX_SEED - 1, MAX_SEED))
    max_logprobs: int = option(
        20,
        "most log-probabilities of a position that a request may ask for; -1: the whole vocabulary",
        within=(-1, MAX_SEED),
    )
    enforce_eager: bool = option(False, "run without captured graphs")
    batch_invariant: bool = option(
        False, "compute each row so that its bits do not depend on the other rows of the batch; slower"
    )
    tensor_parallel_size: int = option(
        1, "processes that compute the model together, each with its share of every layer: one for each GPU"
    )
    distributed_executor_backend: str | None = option(
        None,
        "mp (processes of this machine), ray (actors of a cluster, of one machine or several) or uni (one process) "
        "(default: mp for several ranks; one rank is always one process)",
        choices=("mp", "ray", "uni"),
    )


@dataclass(kw_only=True)
class SchedulingOptions:
    """Scheduling."""

    max_num_seqs: int | None = option(None, "most sequences in a step (default: up to 64 on a CPU, 256 on a GPU)")
    max_num_batched_tokens: int | None = option(None, "most tokens in a step (default: 2048 on a CPU, 8192 on a GPU)")
    max_num_queued_reqs: int | None = option(
        None, "requests that may wait; more are answered with 503 (default: no limit)"
    )
    scheduling_policy: str = option(
        "fcfs",
        "the next request: fcfs, the first that came; priority, the lowest priority number; fair, of the tenant that "
        "was served least for its weight",
        choices=("fcfs", "priority", "fair"),
    )
    fair_prompt_cost: float = option(
        1.0, "price of a prompt token that the prefix cache does not have, under the fair policy"
    )
    # Output must cost something: an account that is charged nothing would always be next.
    fair_output_cost: float = option(2.0, "price of an output token under the fair policy", low_open=True)
    fair_rejected_draft_cost: float = option(1.0, "price of a rejected draft token under the fair policy")
    enable_chunked_prefill: bool = option(True, "split long prompts over several steps")
    prompt_pacing: bool | None = option(
        None,
        "limit the prompt tokens of a step that also decodes, so that running requests hardly slow down; needs "
        "chunked prefill (default: yes, except in LLM, whose users wait for the last output)",
    )
    async_scheduling: bool | None = option(
        None, "plan and prepare a step on the host while the one before it runs (default: on a GPU)"
    )


@dataclass(kw_only=True)
class CacheOptions:
    """KV cache."""

    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts with the same prefix")
    block_size: int = option(16, "tokens in a KV block")
    num_gpu_blocks_override: int | None = option(
        None, "number of KV blocks, on any device (default: as many as memory allows)"
    )
    kv_cache_memory_bytes: int | None = option(
        None, "memory of the KV cache, such as 4GiB (default: a part of what is free)", parse=parse_memory
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; fp8 (the same as fp8_e4m3) holds twice the tokens of bfloat16, rounded to 3 bits of "
        "fraction and at most 448 in size",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory to use", within=(0.0, 1.0), low_open=True)
    swap_space: float = option(0.0, "GiB of host memory for KV blocks that are evicted from the device")
    preemption_mode: str | None = option(
        None,
        "get the KV of a preempted sequence back from swap space, or recompute it (default: the faster, as measured)",
        choices=("recompute", "swap"),
    )
    kv_events_config: dict[str, Any] | None = option(
        None,
        'publish changes of the prefix cache for routers, such as {"enable_kv_cache_events": true, "endpoint": '
        '"tcp://*:5557", "replay_endpoint": "tcp://*:5657"}',
    )
    data_parallel_rank: int = option(
        0,
        "number of this server among its replicas; KV events have it, and their ports are higher by it",
        within=(0, MAX_RANK),
    )


@dataclass(kw_only=True)
class LoRAOptions:
    """LoRA."""

    enable_lora: bool = option(False, "serve LoRA adapters; the demo model does by default")
    max_loras: int = option(8, "largest number of distinct adapters that run at once")
    max_cpu_loras: int | None = option(
        None, "adapters kept in host memory (default: four times max_loras, but at least 32)"
    )
    max_lora_rank: int = option(64, "largest rank of an adapter")
    lora_memory: int | str | None = option(
        None,
        "device memory for adapters, such as 512MiB or 2GB; idle ones stay there until it is full "
        "(default: room for max_loras of max_lora_rank)",
        parse=parse_bytes,
    )
    max_cpu_lora_memory: int | str | None = option(
        None, "host memory for adapters, such as 4GiB (default: only max_cpu_loras counts)", parse=parse_bytes
    )


@dataclass(kw_only=True)
class SpeculationOptions:
    """Speculative decoding."""

    speculative_config: dict[str, Any] | None = option(
        None,
        'such as {"method": "draft_model", "model": PATH, "num_speculative_tokens": 4} or '
        '{"method": "ngram", "num_speculative_tokens": 3}; {"method": "off"} switches it off',
    )
