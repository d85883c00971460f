"""Options that vLLM's users bring with them, where they are none of ours.

One line a name. `ALIASES` are other spellings of flags. `ENGINE` has keywords of `LLM(...)`, which are flags of
`outrider serve` too; `SERVER` has further flags, `SPECULATIVE` keys of a `speculative_config`, `SAMPLING` keywords of
`SamplingParams` and `PROMPT` keys of a prompt. A value that asks for what is done anyway is taken. One without an
effect on results is taken and said. Any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import InvalidRequestError

ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "--allowed-origins": "--cors-origin",
    "--enable-log-requests": "--log-requests",
    "--no-enable-log-requests": "--no-log-requests",
    "--disable-log-requests": "--no-log-requests",
    "--no-disable-log-requests": "--log-requests",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
}
"""Flags of vLLM and the flags here that mean the same."""

VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
}
"""Other spellings of an option's values."""


class Option(NamedTuple):
    """An option of vLLM that has no counterpart here."""

    harmless: tuple[object, ...] | None
    """Values that ask for what is done anyway, beside None; None: every value, though nothing comes of it."""
    why: str
    """Why nothing comes of it, or why other values are refused."""
    flag: bool = False
    """On the command line it has no value."""


def _ignored(why: str) -> Option:
    return Option(None, why)


def _ignored_flag(why: str) -> Option:
    return Option(None, why, flag=True)


def _only(*harmless: object, why: str) -> Option:
    return Option(harmless, why)


def _off(why: str) -> Option:
    return Option((False,), why, flag=True)


_ONE_PROCESS = "one process has the whole model"
_NO_OFFLOAD = "weights and caches are not moved to host memory"
_NO_EXPERTS = "mixtures of experts are not served"
_NO_IMAGES = "prompts are text"
_NO_TOOLS = "calls of tools are not there yet"
_NO_REASONING = "reasoning is not parsed yet"
_NO_FORMATS = "structured outputs are not there yet"
_NO_TLS = "TLS is not served: put a proxy in front, such as Caddy, nginx or an ingress"
_NO_CODE = "code from a model's repository is never run"
_OWN_GRAPHS = "graphs are chosen for the model and the device"
_OWN_LOADER = "only safetensors files are read"
_SPECULATIVE = 'write speculative_config={"method": ..., "model": ..., "num_speculative_tokens": ...}'
_CONFIG = "change config.json in a copy of the model's folder"

ENGINE: dict[str, Option] = {
    # Several devices
    "pipeline_parallel_size": _only(1, why="pipeline parallelism is not there yet"),
    "data_parallel_size": _only(1, why="replicas are separate servers behind a load balancer"),
    "data_parallel_size_local": _only(1, why="replicas are separate servers behind a load balancer"),
    "data_parallel_backend": _ignored(_ONE_PROCESS),
    "decode_context_parallel_size": _only(1, why="context parallelism is not there yet"),
    "prefill_context_parallel_size": _only(1, why="context parallelism is not there yet"),
    "nnodes": _only(1, why=_ONE_PROCESS),
    "enable_expert_parallel": _off(_NO_EXPERTS),
    "enable_eplb": _off(_NO_EXPERTS),
    "moe_backend": _ignored(_NO_EXPERTS),
    "distributed_executor_backend": _ignored(_ONE_PROCESS),
    "disable_custom_all_reduce": _ignored_flag(_ONE_PROCESS),
    "max_parallel_loading_workers": _ignored(_ONE_PROCESS),
    "ray_workers_use_nsight": _ignored_flag(_ONE_PROCESS),
    "worker_cls": _only("auto", why="there are no workers to replace"),
    "worker_extension_cls": _only("", why="there are no workers to extend"),
    # The model and its files
    "task": _only("auto", "generate", why="models generate text only"),
    "runner": _only("auto", "generate", why="models generate text only"),
    "convert": _only("auto", "none", why="models generate text only"),
    "model_impl": _only("auto", "native", "vllm", why="models have this engine's own implementations only"),
    "tokenizer_mode": _only("auto", "hf", why="tokenizers are those of transformers"),
    "skip_tokenizer_init": _off("requests need the tokenizer; detokenize=False leaves it out of answers"),
    "trust_remote_code": _ignored_flag(_NO_CODE),
    "code_revision": _ignored(_NO_CODE),
    "quantization": _only("none", why="quantised weights are not there yet"),
    "config_format": _only("auto", "hf", why="config.json is read only"),
    "hf_config_path": _only(why=_CONFIG),
    "hf_overrides": _only({}, why=_CONFIG),
    "rope_scaling": _only({}, why=_CONFIG),
    "rope_theta": _only(why=_CONFIG),
    "hf_token": _only(True, False, why="set the variable HF_TOKEN"),
    "ignore_patterns": _ignored(_OWN_LOADER),
    "model_loader_extra_config": _only({}, why=_OWN_LOADER),
    "safetensors_load_strategy": _ignored("files are mapped into memory"),
    "use_tqdm_on_load": _ignored_flag("a progress bar is shown on a terminal"),
    "disable_sliding_window": _off("a model's sliding window is part of it"),
    "override_generation_config": _only({}, why="give the values in each request"),
    "pooler_config": _only({}, why="models generate text only"),
    "override_pooler_config": _only({}, why="models generate text only"),
    "io_processor_plugin": _only("", why="there are no plug-ins"),
    "enable_prompt_embeds": _off("prompts are text or token ids"),
    "enable_sleep_mode": _off("an engine cannot sleep yet"),
    "logprobs_mode": _only("raw_logprobs", why="log-probabilities are those of the raw logits"),
    "logits_processors": _only([], (), why="code of the user's own is not run in the engine"),
    # Memory and scheduling
    "swap_space": _ignored("preempted sequences are computed again"),
    "cpu_offload_gb": _only(0, why=_NO_OFFLOAD),
    "kv_offloading_size": _only(why=_NO_OFFLOAD),
    "kv_transfer_config": _only({}, why="KV blocks stay in one engine"),
    "kv_events_config": _only({}, why="events of the KV cache are not published"),
    "calculate_kv_scales": _off("an fp8 cache has no scales"),
    "prefix_caching_hash_algo": _ignored("the prefix cache has its own hash"),
    "preemption_mode": _ignored("preempted sequences are computed again"),
    "num_lookahead_slots": _ignored("slots for drafts follow from speculative_config"),
    "num_scheduler_steps": _ignored("see async_scheduling"),
    "multi_step_stream_outputs": _ignored_flag("each step is streamed"),
    "stream_interval": _ignored("each step is streamed"),
    "scheduler_delay_factor": _ignored("prompts are not delayed; see prompt_pacing"),
    "max_num_partial_prefills": _ignored("see prompt_pacing"),
    "max_long_partial_prefills": _ignored("see prompt_pacing"),
    "long_prefill_token_threshold": _ignored("see prompt_pacing"),
    "disable_chunked_mm_input": _ignored_flag(_NO_IMAGES),
    "disable_hybrid_kv_cache_manager": _ignored_flag("all layers share one kind of KV block"),
    "use_v2_block_manager": _ignored_flag("there is one block manager"),
    "disable_async_output_proc": _ignored_flag("see async_scheduling"),
    # Compilation and kernels
    "compilation_config": _ignored(_OWN_GRAPHS),
    "optimization_level": _ignored(_OWN_GRAPHS),
    "max_seq_len_to_capture": _ignored(_OWN_GRAPHS),
    "cuda_graph_sizes": _ignored(_OWN_GRAPHS),
    "cudagraph_capture_sizes": _ignored(_OWN_GRAPHS),
    "max_cudagraph_capture_size": _ignored(_OWN_GRAPHS),
    "attention_backend": _ignored("kernels are chosen for the device"),
    "attention_config": _ignored("kernels are chosen for the device"),
    "disable_cascade_attn": _ignored_flag("there is no cascade attention"),
    "additional_config": _only({}, why="there are no plug-ins for other hardware"),
    # LoRA and speculation
    "enable_lora_bias": _off("adapters with biases are not served"),
    "fully_sharded_loras": _ignored_flag(_ONE_PROCESS),
    "lora_extra_vocab_size": _ignored("tokens that an adapter adds are found in its files"),
    "lora_dtype": _only("auto", why="adapters have the model's dtype"),
    "long_lora_scaling_factors": _only(why="contexts are as long with adapters as without"),
    "default_mm_loras": _only({}, why=_NO_IMAGES),
    "speculative_model": _only(why=_SPECULATIVE),
    "num_speculative_tokens": _only(why=_SPECULATIVE),
    "ngram_prompt_lookup_max": _only(why=_SPECULATIVE),
    "ngram_prompt_lookup_min": _only(why=_SPECULATIVE),
    # Images, formats, logs
    "mm_encoder_tp_mode": _ignored(_NO_IMAGES),
    "limit_mm_per_prompt": _ignored(_NO_IMAGES),
    "mm_processor_kwargs": _ignored(_NO_IMAGES),
    "mm_processor_cache_gb": _ignored(_NO_IMAGES),
    "disable_mm_preprocessor_cache": _ignored_flag(_NO_IMAGES),
    "language_model_only": _ignored_flag(_NO_IMAGES),
    "allowed_local_media_path": _ignored(_NO_IMAGES),
    "allowed_media_domains": _ignored(_NO_IMAGES),
    "guided_decoding_backend": _ignored(_NO_FORMATS),
    "structured_outputs_config": _ignored(_NO_FORMATS),
    "reasoning_parser": _only("", why=_NO_REASONING),
    "enable_reasoning": _off(_NO_REASONING),
    "disable_log_stats": _ignored_flag("statistics cost nothing and are not logged"),
    "disable_log_requests": _ignored_flag("requests are logged by the server alone"),
    "enable_log_requests": _ignored_flag("requests are logged by the server alone"),
    "collect_detailed_traces": _ignored("a trace has the parts of a request"),
    "show_hidden_metrics_for_version": _ignored("no metrics are hidden"),
}

SERVER: dict[str, Option] = {
    "api_server_count": _only(1, why="one process serves HTTP"),
    "headless": _off(_ONE_PROCESS),
    "uds": _only(why="the server listens on TCP: see --host"),
    "root_path": _only("", why="let the proxy remove the prefix"),
    "middleware": _only([], (), why="code of the user's own is not run in the server; put a proxy in front"),
    "ssl_keyfile": _only(why=_NO_TLS),
    "ssl_certfile": _only(why=_NO_TLS),
    "ssl_ca_certs": _only(why=_NO_TLS),
    "ssl_cert_reqs": _only(0, why=_NO_TLS),
    "ssl_ciphers": _only(why=_NO_TLS),
    "enable_ssl_refresh": _off(_NO_TLS),
    "allow_credentials": _off("keys come in a header, never in a cookie"),
    "allowed_methods": _ignored("all methods of the API are allowed"),
    "allowed_headers": _ignored("all headers are allowed"),
    "enable_auto_tool_choice": _off(_NO_TOOLS),
    "tool_call_parser": _only(why=_NO_TOOLS),
    "tool_parser_plugin": _only("", why=_NO_TOOLS),
    "tool_server": _only(why=_NO_TOOLS),
    "exclude_tools_when_tool_choice_none": _ignored_flag(_NO_TOOLS),
    "response_role": _only("assistant", why="answers are the assistant's"),
    "chat_template_content_format": _ignored("it is found out from the template"),
    "default_chat_template_kwargs": _only({}, why="give chat_template_kwargs in each request"),
    "return_tokens_as_token_ids": _off("tokens are shown as text and bytes"),
    "enable_force_include_usage": _off("clients ask with stream_options.include_usage"),
    "enable_prompt_tokens_details": _ignored_flag("usage has prompt_tokens_details always"),
    "enable_request_id_headers": _ignored_flag("answers have x-request-id always"),
    "enable_server_load_tracking": _ignored_flag("see /metrics"),
    "enable_tokenizer_info_endpoint": _off("there is no such route; see /tokenize"),
    "enable_log_outputs": _off("see --log-prompts"),
    "max_log_len": _ignored("prompts are not logged, or whole"),
    "log_config_file": _ignored("see --log-level and --log-format"),
    "disable_uvicorn_access_log": _ignored_flag("it is off without --access-log"),
    "disable_access_log_for_endpoints": _ignored("see --log-requests"),
    "disable_fastapi_docs": _ignored_flag("there are no such pages"),
    "disable_frontend_multiprocessing": _ignored_flag("the engine has a process of its own"),
    "h11_max_incomplete_event_size": _ignored("see --max-body-bytes"),
    "h11_max_header_count": _ignored("heads of requests are bounded"),
}

SPECULATIVE: dict[str, Option] = {
    "draft_tensor_parallel_size": _only(1, why="tensor parallelism is not there yet"),
    "tensor_parallel_size": _only(1, why="tensor parallelism is not there yet"),
    "quantization": _only("none", why="quantised weights are not there yet"),
    "max_model_len": _ignored("drafts are made up to the model's own max_model_len"),
    "enforce_eager": _ignored_flag("the engine's enforce_eager is used"),
    "code_revision": _ignored(_NO_CODE),
    "disable_by_batch_size": _ignored('"adaptive": true drafts less, or nothing, in large batches'),
    "num_speculative_tokens_per_batch_size": _ignored('"adaptive": true drafts less, or nothing, in large batches'),
    "disable_logprobs": _ignored_flag("log-probabilities are the target's"),
    "disable_mqa_scorer": _ignored_flag("there is one way to verify"),
    "disable_padded_drafter_batch": _ignored_flag("batches of drafters are not padded"),
    "disable_eagle_block_drop": _ignored_flag("no block is dropped"),
    "use_local_argmax_reduction": _ignored_flag(_ONE_PROCESS),
    "index_share_for_mtp_iteration": _ignored_flag("there is no sparse attention"),
    "draft_sample_method": _ignored("drafts are drawn with the noise of the target's tokens"),
    "acceptance_method": _only("rejection_sampler", why="it would change the distribution of the output"),
    "parallel_drafting": _off("drafters that draft in parallel are not there yet"),
    "use_heterogeneous_vocab": _off("a draft model must have the target's vocabulary"),
    "enable_adaptive_verification": _off('see "adaptive"'),
    "kv_cache_dtype": _only("auto", why="a drafter's cache has the engine's kv_cache_dtype"),
    "attention_backend": _ignored("kernels are chosen for the device"),
    "moe_backend": _ignored(_NO_EXPERTS),
    "speculative_token_tree": _only(why="drafts are chains: trees are not there yet"),
    "synthetic_acceptance_length": _only(why="write synthetic_acceptance_rates"),
    "draft_load_config": _only({}, why="a draft is loaded as its target is"),
}

SAMPLING: dict[str, Option] = {
    "best_of": _only(1, why="sequences are not ranked: ask for n of them"),
    "use_beam_search": _off("beam search is not there yet"),
    "length_penalty": _only(1, why="beam search is not there yet"),
    "early_stopping": _off("beam search is not there yet"),
    "truncate_prompt_tokens": _only(why="cut the prompt before"),
    "structured_outputs": _only(why=_NO_FORMATS),
    "guided_decoding": _only(why=_NO_FORMATS),
    "logits_processors": _only([], (), why="code of the user's own is not run in the engine"),
    "output_kind": _only(0, why="LLM returns final outputs; AsyncLLM.generate takes delta=True"),
    "logprob_token_ids": _only(why="ask for logprobs and pick among them"),
    "prompt_logprob_token_ids": _only(why="ask for prompt_logprobs and pick among them"),
    "prompt_logprob_start": _only(0, why="ask for prompt_logprobs and cut them"),
    "flat_logprobs": _off("log-probabilities are lists of dicts"),
    "stream_interval": _ignored("each step is streamed"),
    "skip_clone": _ignored_flag("parameters are copied"),
    "output_text_buffer_length": _ignored("it follows from stop"),
    "extra_args": _only({}, why="there are no plug-ins that read them"),
    "skip_reading_prefix_cache": _off("give the prompt a cache_salt of its own"),
    "thinking_token_budget": _only(why=_NO_REASONING),
    "repetition_detection": _only(why="see repetition_penalty"),
    "routed_experts_prompt_start": _only(0, why=_NO_EXPERTS),
    "trace_decode_token_ids": _only(why="tokens cannot be given in advance"),
}

PROMPT: dict[str, Option] = {
    "type": _only("text", "token", "tokens", why="prompts are text or token ids"),
    "multi_modal_data": _only({}, why=_NO_IMAGES),
    "multi_modal_uuids": _only({}, why=_NO_IMAGES),
    "mm_processor_kwargs": _only({}, why=_NO_IMAGES),
    "prompt_embeds": _only(why="prompts are text or token ids"),
    "token_type_ids": _only(why="models generate text only"),
}


def check_foreign(given: Mapping[str, Any], table: Mapping[str, Option], param: str | None = None) -> dict[str, str]:
    """The names among `given` that `table` takes without an effect, each with the reason.

    Args:
        param: the field that all of them stand in; None: each is a field of its own.

    Raises:
        InvalidRequestError: a value that means something else than what is done; it is named.
    """
    without_effect = {}
    for name, value in given.items():
        if name not in table or value is None:
            continue
        option = table[name]
        if option.harmless is None:
            if value is not False:
                without_effect[name] = option.why
        elif not _harmless(value, option.harmless):
            what = f"{param}: {name}" if param else name
            if name != "hf_token":  # which is a secret
                what = f"{what}={value!r:.100}"
            raise InvalidRequestError(f"{what} is not supported: {option.why}", param=param or name)
    return without_effect


def without_effect(given: Mapping[str, Any], table: Mapping[str, Option], speculative_config: object) -> dict[str, str]:
    """`check_foreign` of options, and of the keys in their `speculative_config`."""
    names = check_foreign(given, table)
    if isinstance(speculative_config, Mapping):
        inside = check_foreign(speculative_config, SPECULATIVE, "speculative_config")
        names |= {f"speculative_config.{name}": why for name, why in inside.items()}
    return names


def _harmless(value: Any, harmless: tuple[object, ...]) -> bool:
    plain = getattr(value, "value", value)  # of an enum
    try:
        return bool(plain in harmless)
    except (TypeError, ValueError):  # an array
        return False


def plain_value(name: str, value: Any) -> Any:
    """The value of an option in our spelling: "half", or torch.float16, is "float16"."""
    if type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    return VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value
