"""Options of vLLM (and some of SGLang) that this project does not have, grouped by the reason.

`ALIASES` are other spellings of flags. `ENGINE` has keywords of `LLM(...)`, which are flags of `outrider serve` too,
and `SERVER` further flags. `SPECULATIVE` has keys of a `speculative_config`. A value that matches the actual behaviour
is accepted. A value without an effect on results is accepted with a warning. Any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .unsupported_options import (
    IN_CONFIG_JSON,
    IN_SPECULATIVE_CONFIG,
    NO_CODE,
    NO_EXPERTS,
    NO_IMAGES,
    NO_OFFLOAD,
    NO_STATE_SPACE,
    NO_TLS,
    NO_USER_CODE,
    ONE_PROCESS,
    OWN_GRAPHS,
    OWN_LOADER,
    RAY_NODES,
    WHOLE_EXPERTS,
    Option,
    check_unsupported_options,
    each,
    ignored,
    ignored_flag,
    off,
    only,
)

ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-O": "--optimization-level",
    "--allowed-origins": "--cors-origin",
    "--enable-log-requests": "--log-requests",
    "--no-enable-log-requests": "--no-log-requests",
    "--disable-log-requests": "--no-log-requests",
    "--no-disable-log-requests": "--log-requests",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
    "--kv-cache-memory": "--kv-cache-memory-bytes",
    # SGLang
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-num-queued-reqs",
    "--random-seed": "--seed",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-cuda-graph": "--enforce-eager",
    "--lora-paths": "--lora-modules",
    "--max-loras-per-batch": "--max-loras",
}
"""Flags of vLLM and SGLang, and the flags here that mean the same."""

VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "model_impl": {"vllm": "native"},
    "load_format": {"safetensors": "auto", "hf": "auto", "fastsafetensors": "auto"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
}
"""Other spellings of an option's values."""


ENGINE: dict[str, Option] = {
    # Several devices
    "pipeline_parallel_size": only(
        1,
        why="it is not there yet: a step is one batch, so one stage would compute and the others wait; "
        "tensor_parallel_size divides every layer",
    ),
    **each(
        only(1, why="replicas are separate servers behind a load balancer"),
        "data_parallel_size data_parallel_size_local",
    ),
    "data_parallel_start_rank": only(0, why="replicas are separate servers behind a load balancer"),
    **each(
        ignored(ONE_PROCESS),
        "data_parallel_address data_parallel_rpc_port data_parallel_backend master_addr master_port "
        "max_parallel_loading_workers",
    ),
    "data_parallel_hybrid_lb": off("replicas are separate servers behind a load balancer"),
    "data_parallel_external_lb": ignored_flag("replicas are separate servers behind a load balancer"),
    **each(
        only(1, why="context parallelism is not there yet"),
        "decode_context_parallel_size prefill_context_parallel_size",
    ),
    "nnodes": only(1, why=RAY_NODES),
    "node_rank": only(0, why=RAY_NODES),
    "enable_dbo": ignored_flag("one device has no communication to overlap"),
    "numa_bind": ignored_flag("start the server with numactl"),
    "enable_expert_parallel": WHOLE_EXPERTS,
    "enable_eplb": off(NO_EXPERTS),
    **each(ignored(NO_EXPERTS), "eplb_config all2all_backend moe_backend"),
    **each(ignored_flag(ONE_PROCESS), "disable_custom_all_reduce ray_workers_use_nsight"),
    "worker_cls": only("auto", why="there are no workers to replace"),
    "worker_extension_cls": only("", why="there are no workers to extend"),
    # The model and its files
    "task": only(
        *"auto generate embed embedding score classify".split(),
        why="models that generate text embed, too, and classifiers classify",
    ),
    "runner": only("auto", "generate", "pooling", why="models that generate text embed, too, and classifiers classify"),
    "convert": only("auto", "none", "embed", why="models are served as they are"),
    "tokenizer_mode": only("auto", "hf", why="tokenizers are those of transformers"),
    "trust_remote_code": ignored_flag(NO_CODE),
    "code_revision": ignored(NO_CODE),
    "config_format": only("auto", "hf", why="config.json is read only"),
    **each(only(why=IN_CONFIG_JSON), "hf_config_path rope_theta"),
    **each(only({}, why=IN_CONFIG_JSON), "hf_overrides rope_scaling"),
    "hf_token": only(True, False, why="set the variable HF_TOKEN"),
    "ignore_patterns": ignored(OWN_LOADER),
    "model_loader_extra_config": only({}, why=OWN_LOADER),
    "safetensors_load_strategy": ignored("files are mapped into memory"),
    "use_tqdm_on_load": ignored_flag("a progress bar is shown on a terminal"),
    "disable_sliding_window": off("a model's sliding window is part of it"),
    **each(only({}, why="PoolingParams has the pooling"), "pooler_config override_pooler_config"),
    "io_processor_plugin": only("", why="there are no plug-ins"),
    "enable_prompt_embeds": off("prompts are text or token ids"),
    "enable_sleep_mode": Option((True, False), "every engine can sleep", flag=True),
    "logprobs_mode": only("raw_logprobs", why="log-probabilities are those of the raw logits"),
    "logits_processors": only([], (), why=NO_USER_CODE),
    "logits_processor_pattern": ignored(NO_USER_CODE),
    # Memory and scheduling
    **each(only(0, why=NO_OFFLOAD), "cpu_offload_gb offload_group_size"),
    "kv_offloading_size": only(why="see swap_space"),
    "kv_offloading_backend": ignored("see swap_space"),
    "offload_backend": only("auto", why=NO_OFFLOAD),
    "kv_sharing_fast_prefill": ignored_flag("no layers share KV"),
    **each(ignored(NO_STATE_SPACE), "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size"),
    "kv_transfer_config": only({}, why="KV blocks stay in one engine"),
    "calculate_kv_scales": off("an fp8 cache has the scales of the checkpoint"),
    "prefix_caching_hash_algo": ignored("the prefix cache has its own hash"),
    "num_lookahead_slots": ignored("slots for drafts follow from speculative_config"),
    "num_scheduler_steps": ignored("see async_scheduling"),
    "multi_step_stream_outputs": ignored_flag("each step is streamed"),
    "stream_interval": ignored("each step is streamed"),
    "scheduler_delay_factor": ignored("prompts are not delayed; see prompt_pacing"),
    **each(
        ignored("see prompt_pacing"),
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold performance_mode",
    ),
    "disable_chunked_mm_input": ignored_flag(NO_IMAGES),
    "disable_hybrid_kv_cache_manager": ignored_flag("all layers share one kind of KV block"),
    "use_v2_block_manager": ignored_flag("there is one block manager"),
    "disable_async_output_proc": ignored_flag("see async_scheduling"),
    "scheduler_cls": only(why=NO_USER_CODE),
    "scheduler_reserve_full_isl": ignored_flag("requests start when their first step fits"),
    **each(
        ignored("texts are tokenized in threads"),
        "tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers",
    ),
    # Compilation and kernels
    **each(
        ignored(OWN_GRAPHS),
        "compilation_config optimization_level max_seq_len_to_capture cuda_graph_sizes cudagraph_capture_sizes "
        "max_cudagraph_capture_size compilation_mode",
    ),
    **each(ignored("kernels are chosen for the device"), "attention_backend attention_config"),
    "disable_cascade_attn": ignored_flag("there is no cascade attention"),
    "enable_flashinfer_autotune": ignored_flag("kernels are chosen for the device"),
    "kernel_config": ignored("see kernel_configs"),
    "profiler_config": ignored("start_profile() takes a folder"),
    "additional_config": only({}, why="there are no plug-ins for other hardware"),
    # LoRA and speculation
    "enable_lora_bias": Option((True, False), "adapters with biases are served", flag=True),
    "fully_sharded_loras": ignored_flag(ONE_PROCESS),
    "lora_extra_vocab_size": ignored("tokens that an adapter adds are found in its files"),
    "lora_target_modules": only([], (), why="adapters are served with all modules that they have"),
    "enable_tower_connector_lora": off(NO_IMAGES),
    "specialize_active_lora": ignored_flag(OWN_GRAPHS),
    "enable_prompt_adapter": off("prompt adapters are not served"),
    **each(ignored("prompt adapters are not served"), "max_prompt_adapters max_prompt_adapter_token"),
    "lora_dtype": only("auto", why="adapters have the model's dtype"),
    "long_lora_scaling_factors": only(why="contexts are as long with adapters as without"),
    "default_mm_loras": only({}, why=NO_IMAGES),
    **each(
        only(why=IN_SPECULATIVE_CONFIG),
        "speculative_model num_speculative_tokens ngram_prompt_lookup_max ngram_prompt_lookup_min "
        "speculative_algorithm speculative_draft_model_path speculative_num_draft_tokens speculative_num_steps",
    ),
    "speculative_eagle_topk": only(1, why="drafts are chains: trees are not there yet"),
    # Images, formats, logs
    **each(
        ignored(NO_IMAGES),
        "mm_encoder_tp_mode limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb "
        "allowed_local_media_path allowed_media_domains media_io_kwargs video_pruning_rate "
        "mm_processor_cache_type",
    ),
    **each(
        ignored_flag(NO_IMAGES),
        "disable_mm_preprocessor_cache language_model_only skip_mm_profiling interleave_mm_strings",
    ),
    **each(off(NO_IMAGES), "enable_mm_embeds mm_encoder_only"),
    **each(ignored("llguidance makes the masks"), "guided_decoding_backend structured_outputs_config"),
    "reasoning_parser": only("", why="answers of LLM are the model's own text"),  # `outrider serve` has it
    "enable_reasoning": ignored_flag("--reasoning-parser alone does it"),
    "disable_log_stats": ignored_flag("statistics cost nothing and are not logged"),
    **each(ignored_flag("requests are logged by the server alone"), "disable_log_requests enable_log_requests"),
    "collect_detailed_traces": ignored("a trace has the parts of a request"),
    "enable_logging_iteration_details": ignored_flag("see --log-level debug"),
    "enable_layerwise_nvtx_tracing": ignored_flag("see outrider bench latency --profile"),
    "kv_cache_metrics": ignored_flag("/metrics has those of the KV cache always"),
    "kv_cache_metrics_sample": ignored("/metrics has those of the KV cache always"),
    "cudagraph_metrics": ignored_flag("graphs have no metrics"),
    "enable_mfu_metrics": ignored_flag("see outrider bench latency"),
    "fail_on_environ_validation": ignored_flag("no variables of the environment are checked"),
    "weight_transfer_config": only({}, why="weights are read from files only"),
    # SGLang
    "mem_fraction_static": only(why="see gpu_memory_utilization, which counts activations too"),
    **each(only(why="see max_num_batched_tokens"), "chunked_prefill_size max_prefill_tokens"),
    "schedule_policy": only("fcfs", why="see scheduling_policy"),
    "schedule_conservativeness": ignored("see num_gpu_blocks_override"),
    "max_total_tokens": only(why="see num_gpu_blocks_override"),
    "page_size": only(why="see block_size"),
    "enable_torch_compile": ignored_flag(OWN_GRAPHS),
    "cuda_graph_max_bs": ignored(OWN_GRAPHS),
    **each(ignored("kernels are chosen for the device"), "lora_backend sampling_backend"),
    "show_hidden_metrics_for_version": ignored("no metrics are hidden"),
}

SERVER: dict[str, Option] = {
    "api_server_count": only(1, why="one process serves HTTP"),
    "headless": off(ONE_PROCESS),
    "uds": only(why="the server listens on TCP: see --host"),
    "root_path": only("", why="let the proxy remove the prefix"),
    "middleware": only([], (), why="code of the user's own is not run in the server; put a proxy in front"),
    **each(only(why=NO_TLS), "ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers"),
    "ssl_cert_reqs": only(0, why=NO_TLS),
    "enable_ssl_refresh": off(NO_TLS),
    "allow_credentials": off("keys come in a header, never in a cookie"),
    "allowed_methods": ignored("all methods of the API are allowed"),
    "allowed_headers": ignored("all headers are allowed"),
    "enable_auto_tool_choice": ignored_flag("tools are always served"),
    "tool_server": only(why="tools run at the client"),
    "tool_parser_plugin": only("", why=NO_USER_CODE),
    "exclude_tools_when_tool_choice_none": ignored_flag("they always are"),
    "response_role": only("assistant", why="answers are the assistant's"),
    "chat_template_content_format": ignored("it is found out from the template"),
    "return_tokens_as_token_ids": off("tokens are shown as text and bytes"),
    "enable_force_include_usage": off("clients ask with stream_options.include_usage"),
    "enable_prompt_tokens_details": ignored_flag("usage has prompt_tokens_details always"),
    "enable_request_id_headers": ignored_flag("answers have x-request-id always"),
    "enable_server_load_tracking": ignored_flag("/load is always there"),
    "enable_tokenizer_info_endpoint": ignored_flag("/tokenizer_info is always there"),
    "enable_log_outputs": off("see --log-prompts"),
    "enable_log_deltas": ignored_flag("see --log-prompts"),
    "log_error_stack": ignored_flag("see --log-level"),
    "enable_per_request_metrics": off("clients ask with return_metrics"),
    "enable_metrics": ignored_flag("see /metrics"),
    **each(ignored_flag("there are no such pages"), "enable_offline_docs disable_fastapi_docs"),
    "fingerprint_mode": ignored("system_fingerprint is null"),
    "tokens_only": off("there is no such route"),
    "grpc": off("the server speaks HTTP"),
    "max_log_len": ignored("prompts are not logged, or whole"),
    "log_config_file": ignored("see --log-level and --log-format"),
    "disable_uvicorn_access_log": ignored_flag("it is off without --access-log"),
    "disable_access_log_for_endpoints": ignored("see --log-requests"),
    "disable_frontend_multiprocessing": ignored_flag("the engine has a process of its own"),
    "h11_max_incomplete_event_size": ignored("see --max-body-bytes"),
    "h11_max_header_count": ignored("heads of requests are bounded"),
}

SPECULATIVE: dict[str, Option] = {
    **each(only(1, why="drafts are made by one rank"), "draft_tensor_parallel_size tensor_parallel_size"),
    "max_model_len": ignored("drafts are made up to the model's own max_model_len"),
    "enforce_eager": ignored_flag("the engine's enforce_eager is used"),
    "code_revision": ignored(NO_CODE),
    **each(
        ignored('"adaptive": true drafts less, or nothing, in large batches'),
        "disable_by_batch_size num_speculative_tokens_per_batch_size",
    ),
    "disable_logprobs": ignored_flag("log-probabilities are the target's"),
    "disable_mqa_scorer": ignored_flag("there is one way to verify"),
    "disable_padded_drafter_batch": ignored_flag("batches of drafters are not padded"),
    "disable_eagle_block_drop": ignored_flag("no block is dropped"),
    "use_local_argmax_reduction": ignored_flag(ONE_PROCESS),
    "index_share_for_mtp_iteration": ignored_flag("there is no sparse attention"),
    "draft_sample_method": ignored("drafts are drawn with the noise of the target's tokens"),
    "acceptance_method": only("rejection_sampler", why="it would change the distribution of the output"),
    "enable_adaptive_verification": off('see "adaptive"'),
    "kv_cache_dtype": only("auto", why="a drafter's cache has the engine's kv_cache_dtype"),
    "attention_backend": ignored("kernels are chosen for the device"),
    "moe_backend": ignored(NO_EXPERTS),
    "speculative_token_tree": only(why="drafts are chains: trees are not there yet"),
    "synthetic_acceptance_length": only(why="write synthetic_acceptance_rates"),
    "draft_load_config": only({}, why="a draft is loaded as its target is"),
}


def without_effect(given: Mapping[str, Any], table: Mapping[str, Option], speculative_config: object) -> dict[str, str]:
    """`check_unsupported_options` for options, and for the keys of their `speculative_config`."""
    names = check_unsupported_options(given, table)
    if isinstance(speculative_config, Mapping):
        inside = check_unsupported_options(speculative_config, SPECULATIVE, "speculative_config")
        names |= {f"speculative_config.{name}": why for name, why in inside.items()}
    return names


def plain_value(name: str, value: Any) -> Any:
    """The value of an option in our spelling: "half", or torch.float16, is "float16"."""
    if type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    return VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value
