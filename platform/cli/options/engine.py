"""Options of the engine: one flag for each field of EngineArgs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from ...core.compat.vllm_options import VALUES
from ...core.config import DTYPES, KV_CACHE_DTYPES, POLICIES, EngineArgs
from ...core.errors import InvalidRequestError
from ...core.sizes import parse_bytes, parse_count, parse_length

_CHOICES = {
    "dtype": (*DTYPES, *VALUES["dtype"]),
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "scheduling_policy": POLICIES,
    "device": ("auto", "cpu", "cuda"),
    "load_format": ("auto", "dummy", *VALUES["load_format"]),
}
_NO_FLAG = {"model", "served_model_name"}
"""Fields without a flag here: `model` is the command's argument, and the served names have a flag of the server."""

# group -> option -> what it does. An option that is not listed here gets a flag too, without a text.
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
        "download_dir": "folder of the hub's cache (default: where its library keeps it)",
        "dtype": 'type of weights and activations; "auto" takes the checkpoint\'s',
        "device": "where to run; auto takes a GPU if there is one",
        "load_format": '"dummy" fills the model with random weights, for benchmarks',
        "max_model_len": (
            "longest sequence, prompt and output together, in tokens, also as 4k (4000) or 4K (4096) "
            "(default: auto, the model's limit)"
        ),
        "seed": "seed of requests that bring none",
        "max_logprobs": "most log-probabilities a token that a request may ask for; -1: the whole vocabulary",
        "enforce_eager": "run without captured graphs",
        "batch_invariant": "compute every row so that, bit for bit, it does not depend on the rows beside it; slower",
        "tensor_parallel_size": "devices that share one model",
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
    },
    "LoRA": {
        "enable_lora": "serve LoRA adapters (the demo model does unless told otherwise)",
        "max_loras": "most distinct adapters that run at once",
        "lora_memory": (
            "device memory for adapters, such as 512MiB or 2GB; those that nobody runs stay there while it lasts "
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
_OTHER = "other engine options"


def flag(option: str) -> str:
    """The flag of a field: "--max-model-len" for max_model_len."""
    return "--" + option.replace("_", "-")


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def count(text: str) -> int:
    """An argparse type: an integer, also with a unit, such as 4k."""
    try:
        return parse_count("it", text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def length(text: str) -> int | None:
    """An argparse type: as `count`, or "auto" or -1, which are None."""
    try:
        return parse_length("it", text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def memory(text: str) -> int:
    """An argparse type: as `count`, or a number of bytes such as 4GiB."""
    try:
        return parse_count("it", text)
    except InvalidRequestError:
        pass
    try:
        return parse_bytes("it", text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def add_engine_options(parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
    """Add the flags in groups, which are returned by title. The namespace has only the given ones."""
    groups = {}
    listed = {option for options in GROUPS.values() for option in options}
    others = {f.name: "" for f in dataclasses.fields(EngineArgs) if f.name not in listed | _NO_FLAG}
    hints = typing.get_type_hints(EngineArgs)
    defaults = {f.name: f.default for f in dataclasses.fields(EngineArgs)}
    for title, options in ({**GROUPS, _OTHER: others} if others else GROUPS).items():
        group = groups[title] = parser.add_argument_group(title)
        for option, text in options.items():
            _add_option(group, option, hints[option], _help(text, defaults[option]))
    return groups


def _help(text: str, default: object) -> str:
    text = text.replace("%", "%%")
    if default is None or "(default" in text:
        return text
    return f"{text} (default: {default})".strip()


def _add_option(group: argparse._ArgumentGroup, option: str, hint: Any, text: str) -> None:
    kind = _plain_type(hint)
    common: dict[str, Any] = {"dest": option, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        group.add_argument(flag(option), action=argparse.BooleanOptionalAction, **common)
    elif option in _CHOICES:
        group.add_argument(flag(option), choices=_CHOICES[option], **common)
    else:
        parse: Callable[[str], Any] = {int: count, dict: json_object}.get(kind, kind)
        parse = {"max_model_len": length, "kv_cache_memory_bytes": memory}.get(option, parse)
        metavar = {int: "N", float: "X", dict: "JSON"}.get(kind, option.rpartition("_")[2].upper())
        group.add_argument(flag(option), type=parse, metavar=metavar, **common)


def _plain_type(hint: Any) -> type:
    """The type of a flag: int for `int | None`, dict for `dict[str, Any] | None`, str for `int | str | None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hints = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        hint = str if str in hints else hints[0]
    plain = typing.get_origin(hint) or hint
    assert isinstance(plain, type), hint
    return plain


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Options of EngineArgs that the command line gives, with their values."""
    fields: Iterable[str] = (f.name for f in dataclasses.fields(EngineArgs) if f.name not in _NO_FLAG)
    return {name: getattr(namespace, name) for name in fields if hasattr(namespace, name)}
