"""Keywords of vLLM's Python API that this project does not have, grouped by the reason.

`SAMPLING`, `POOLING` and `STRUCTURED` have keywords of `SamplingParams`, `PoolingParams` and `StructuredOutputsParams`,
`PROMPT` keys of a prompt, `GENERATE` and `CHAT` keywords of the methods of those names, `ENGINE_LIFE` those with which
engines are made, `LORA` keywords of `LoRARequest`. `METHODS` has replacements for methods of vLLM's `LLM`.
"""

from __future__ import annotations

from .unsupported_options import (
    NO_EXPERTS,
    NO_IMAGES,
    NO_REASONING,
    NO_USER_CODE,
    OWN_LOADER,
    Option,
    each,
    ignored,
    ignored_flag,
    off,
    only,
)

SAMPLING: dict[str, Option] = {
    "best_of": only(1, why="sequences are not ranked: ask for n of them"),
    **each(off("see LLM.beam_search and BeamSearchParams"), "use_beam_search early_stopping"),
    "length_penalty": only(1, why="see LLM.beam_search and BeamSearchParams"),
    "truncate_prompt_tokens": only(why="cut the prompt before"),
    "guided_decoding": only(why="write structured_outputs=StructuredOutputsParams(...)"),
    "logits_processors": only([], (), why=NO_USER_CODE),
    "prompt_logprob_token_ids": only(why="ask for prompt_logprobs and pick among them"),
    "prompt_logprob_start": only(0, why="ask for prompt_logprobs and cut them"),
    "flat_logprobs": off("log-probabilities are lists of dicts"),
    "stream_interval": ignored("each step is streamed"),
    "skip_clone": ignored_flag("parameters are copied"),
    "output_text_buffer_length": ignored("it follows from stop"),
    "extra_args": only({}, why="there are no plug-ins that read them"),
    "skip_reading_prefix_cache": off("give the prompt a cache_salt of its own"),
    "routed_experts_prompt_start": only(0, why=NO_EXPERTS),
    "trace_decode_token_ids": only(why="tokens cannot be given in advance"),
}

POOLING: dict[str, Option] = {
    "task": only("embed", "score", why="the method says what is done: embed, encode, score or classify"),
    "truncate_prompt_tokens": SAMPLING["truncate_prompt_tokens"],
    "use_activation": only(why="write normalize"),
    "skip_reading_prefix_cache": SAMPLING["skip_reading_prefix_cache"],
    "output_kind": ignored("a prompt has one output"),
    "extra_kwargs": only({}, why="there are no plug-ins that read them"),
    **each(only(why="each prompt has one vector"), "step_tag_id returned_token_ids"),
    "requires_token_ids": off("outputs have prompt_token_ids always"),
}

STRUCTURED: dict[str, Option] = {
    **each(ignored("llguidance makes the masks"), "backend _backend"),
    "disable_fallback": ignored_flag("llguidance makes the masks"),
}

PROMPT: dict[str, Option] = {
    "type": only("text", "token", "tokens", why="prompts are text or token ids"),
    **each(only({}, why=NO_IMAGES), "multi_modal_data multi_modal_uuids mm_processor_kwargs"),
    "prompt_embeds": only(why="prompts are text or token ids"),
    "token_type_ids": only(why="models that read a text in both directions are not served"),
}

GENERATE: dict[str, Option] = {
    "prompt_token_ids": only(why='write prompts={"prompt_token_ids": ids}, or a list of such prompts'),
    "tokenization_kwargs": only({}, why="cut or pad the prompt before"),
    "guided_options_request": only(why="write SamplingParams(structured_outputs=...)"),
    "prompt_adapter_request": only(why="prompt adapters are not served"),
    "mm_processor_kwargs": only({}, why=NO_IMAGES),
    # AsyncLLM
    "prompt_text": ignored("the prompt has its text"),
    "trace_headers": ignored("requests over HTTP have them"),
    "data_parallel_rank": only(0, why="replicas are separate servers behind a load balancer"),
    "reasoning_ended": ignored(NO_REASONING),
}

ENGINE_LIFE: dict[str, Option] = {
    **each(ignored("there is one way to make an engine"), "usage_context start_engine_loop executor_class"),
    **each(ignored("metrics are read with get_metrics()"), "stat_loggers disable_log_stats"),
    "enable_multiprocessing": ignored("LLMEngine runs in this process, AsyncLLMEngine's in another one"),
    **each(ignored("requests are logged by the server"), "enable_log_requests disable_log_requests"),
}
"""Keywords of `LLMEngine.from_engine_args` and `AsyncLLM.from_engine_args`, and fields of `AsyncEngineArgs`."""

CHAT: dict[str, Option] = {
    "chat_template_content_format": only("auto", "string", "openai", why="it is found out from the template"),
    "tokenization_kwargs": GENERATE["tokenization_kwargs"],
    "mm_processor_kwargs": GENERATE["mm_processor_kwargs"],
}

LORA: dict[str, Option] = {
    "base_model_name": ignored("the base model is the engine's"),
    "long_lora_max_len": only(why="contexts are as long with adapters as without"),
    "tensorizer_config_dict": only({}, why=OWN_LOADER),
    "load_inplace": off("write llm.load_lora_adapter(request, load_inplace=True)"),
    "is_3d_lora_weight": off(NO_EXPERTS),
}

METHODS: dict[str, str] = {
    "reward": "is not there: models generate text, embed or classify",
    "model_config": "is not there: see engine_info",
    "do_log_stats": "is not there: see get_metrics()",
    **dict.fromkeys(("is_running", "is_stopped", "errored", "dead_error"), "is not there: see state and failure"),
    **dict.fromkeys(
        ("start_weight_update", "start_draft_weight_update", "finish_weight_update", "init_weight_transfer_engine"),
        "is not there: update_weights(path, draft=...) is a whole update",
    ),
    "set_tokenizer": "is not there: see the option tokenizer",
    **dict.fromkeys(("collective_rpc", "apply_model"), "is not there: " + NO_USER_CODE),
}
"""Methods and attributes of vLLM's `LLM` -> the end of the sentence that says why each is missing."""
