"""Options of the engine: one flag for each field of EngineArgs."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import Any

from ...core.compat.vllm_options import VALUES
from ...core.config import CHOICES, EngineArgs, check_args
from ...core.errors import InvalidRequestError
from ...core.speculative_config import parse_speculative
from .field_flags import add_field_flag, given_fields
from .option_types import length, memory

_TYPES = {"max_model_len": length, "kv_cache_memory_bytes": memory}
_NO_FLAG = ("model", "served_model_name")
"""Fields without a flag here: `model` is the command's argument, and the served names have a flag of the server."""

# group -> option -> what it does, for every other field.
GROUPS: dict[str, dict[str, str]] = {
    "model": {
        "revision": "branch, tag or commit of the model's hub id",
        "tokenizer": "HF directory or hub id of the tokenizer (default: the model's)",
        "generation_config": (
            "sampling parameters of requests that leave them out: auto takes those of the model's (and an adapter's) "
            "generation_config.json, none (or vllm) takes none, a path those of that folder or file"
        ),
        "override_generation_config": 'JSON of such parameters, before those of files, such as {"temperature": 0.6}',
        "tokenizer_revision": "branch, tag or commit of the tokenizer's hub id",
        "skip_tokenizer_init": "load no tokenizer: prompts are token ids, and answers have token ids and no text",
        "download_dir": "folder of the hub's cache (default: where its library keeps it)",
        "dtype": 'type of weights and activations; "auto" takes the checkpoint\'s',
        "device": "where to run; auto takes a GPU if there is one",
        "quantization": (
            "int8, int4 or fp8: quantise the weights of a full-precision checkpoint while they are loaded (default: as "
            "they are stored; a quantised checkpoint's method is found by itself)"
        ),
        "load_format": '"dummy" fills the model with random weights, for benchmarks',
        "model_impl": (
            "code that computes the model: native, transformers (its modelling code over this engine's cache and "
            "linear layers), or auto, which is native where there is a family for the architecture"
        ),
        "max_model_len": (
            "longest sequence, prompt and output together, in tokens, also as 4k (4000) or 4K (4096) "
            "(default: auto, the model's limit)"
        ),
        "seed": "seed of requests that bring none",
        "max_logprobs": "most log-probabilities a token that a request may ask for; -1: the whole vocabulary",
        "enforce_eager": "run without captured graphs",
        "batch_invariant": "compute every row so that, bit for bit, it does not depend on the other rows; slower",
        "tensor_parallel_size": "processes, one for each GPU, that compute one model together",
        "distributed_executor_backend": "mp (processes of this machine; the default for several ranks), ray (actors of "
        "a cluster, of one machine or several) or uni (one process)",
    },
    "scheduling and KV cache": {
        "max_num_seqs": "most sequences in a step",
        "max_num_batched_tokens": "most tokens in a step",
        "max_num_queued_reqs": "requests that may wait; more are answered with 503 (default: no limit)",
        "scheduling_policy": (
            "who runs first: first come, lowest priority number, or the tenant served least for its weight"
        ),
        "fair_prompt_cost": "what a prompt token costs a tenant under the fair policy",
        "fair_output_cost": "what a generated token costs it",
        "fair_rejected_draft_cost": "what a draft token verified in vain costs it",
        "enable_chunked_prefill": "split long prompts over several steps",
        "async_scheduling": "plan and prepare a step while the one before it runs (default: on a GPU)",
        "prompt_pacing": (
            "beside running requests compute so few prompt tokens a step that they hardly notice (default: yes)"
        ),
        "enable_prefix_caching": "reuse the KV blocks of prompts that begin alike",
        "block_size": "tokens in a KV block",
        "num_gpu_blocks_override": "number of KV blocks, on any device (default: what memory allows)",
        "kv_cache_memory_bytes": "memory of the KV cache, such as 4GiB",
        "kv_cache_dtype": "type of the KV cache; fp8 holds twice the tokens of bfloat16, rounded to 3 bits of fraction",
        "gpu_memory_utilization": "share of a GPU's memory to use, 0 to 1",
        "swap_space": "GiB of host memory for KV blocks that have to leave the device",
        "preemption_mode": "swap or recompute what a preempted sequence has lost (default: the faster, as measured)",
    },
    "LoRA": {
        "enable_lora": "serve LoRA adapters (the demo model does unless told otherwise)",
        "max_loras": "most distinct adapters that run at once",
        "lora_memory": (
            "device memory for adapters, such as 512MiB or 2GB; unused ones stay there until it is full "
            "(default: room for max-loras of max-lora-rank)"
        ),
        "max_cpu_loras": "adapters kept in host memory",
        "max_cpu_lora_memory": "host memory for adapters, such as 4GiB (default: max-cpu-loras alone counts)",
        "max_lora_rank": "largest rank an adapter may have",
    },
    "speculative decoding": {
        "speculative_config": (
            'JSON, such as {"method": "draft_model", "model": PATH, "num_speculative_tokens": 4} or '
            '{"method": "ngram", "num_speculative_tokens": 3}; {"method": "off"} switches it off'
        ),
    },
}


def add_engine_options(parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
    """Add the flags in groups, which are returned by title. The namespace has only the given ones."""
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    hints = typing.get_type_hints(EngineArgs)
    groups = {}
    for title, options in GROUPS.items():
        group = groups[title] = parser.add_argument_group(title)
        for name, text in options.items():
            choices = (*CHOICES[name], *VALUES.get(name, ())) if name in CHOICES else None
            add_field_flag(group, fields[name], hints[name], text, choices, _TYPES.get(name))
    groups["speculative decoding"].add_argument(
        "--no-speculation", action="store_true", help='the same as --speculative-config \'{"method": "off"}\''
    )
    return groups


def resolve_engine(
    namespace: argparse.Namespace, model: str | None, given: dict[str, Any]
) -> tuple[EngineArgs, dict[str, Path]]:
    """The options of the engine: those given, else the demo's for the demo; and the demo's adapters (name -> folder).

    Raises:
        InvalidRequestError: an option is wrong whatever the model; `param` names it.
    """
    from ...client.demo_defaults import apply_demo_defaults

    if namespace.no_speculation:
        if given.get("speculative_config") is not None:
            raise InvalidRequestError("not allowed together with --speculative-config", param="no_speculation")
        given["speculative_config"] = {"method": "off"}
    args, demo_adapters = apply_demo_defaults(EngineArgs(model=model, **given), given)
    check_args(args)
    parse_speculative(args.speculative_config)
    return args, demo_adapters


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Options of EngineArgs that the command line gives, with their values."""
    return given_fields(EngineArgs, namespace, _NO_FLAG)
