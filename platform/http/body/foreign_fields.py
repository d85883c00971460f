"""Fields of other servers' request bodies (OpenAI, vLLM, SGLang, TGI, llama.cpp) that Outrider does not implement.

A field is in one of two tables: what would change the answer is refused unless its value is a no-op; what would not is
ignored. A field in neither table is ignored too. null always means that a field is not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Unsupported(NamedTuple):
    """A field that changes the answer."""

    no_ops: tuple[Any, ...] = ()
    """Values with which it changes nothing."""
    instead: str = ""
    """Our field of the same meaning: if it is given too, the foreign one is ignored."""
    advice: str = "leave it out"
    """Advice in the error."""


def _each(field: Unsupported, names: str) -> dict[str, Unsupported]:
    return dict.fromkeys(names.split(), field)


_ADAPTER = "name the adapter in 'model'"
_CONTINUE = "send 'continue_final_message'"
_SYSTEM = "send a message with the role 'system'"


_PROMPT: dict[str, Unsupported] = {
    **_each(Unsupported(([],), advice="write 'tools'"), "functions"),
    **_each(Unsupported(([],)), "tools documents"),
    **_each(Unsupported(), "truncate_prompt_tokens prompt_truncate_len"),
}

TEMPLATE_UNSUPPORTED: Mapping[str, Unsupported] = _PROMPT
"""Fields that change a prompt, for `/tokenize`."""

_FORMATS = {
    **_each(Unsupported(("none", "auto")), "tool_choice function_call"),
    **_each(
        Unsupported(("",)),
        "structural_tag json_schema regex ebnf grammar format",
    ),
    **_each(
        Unsupported((False,)),
        "return_tokens_as_token_ids return_prompt_text return_hidden_states return_routed_experts return_meta_info",
    ),
    "return_prompt_token_ids": Unsupported((False,), instead="return_token_ids"),
    "moderation": Unsupported(),
}

_SOURCES = {
    **_each(Unsupported(), "audio web_search_options"),
    "modalities": Unsupported((["text"],)),
    "prompt_embeds": Unsupported(("", [])),
    **_each(Unsupported(([],)), "images data_sources input_ids"),
    "image_data": Unsupported(([], "")),
    **_each(Unsupported(({},)), "multi_modal_data session_params parameters options"),
    "inputs": Unsupported(("",), instead="prompt"),
    "system": Unsupported(("", []), advice=_SYSTEM),
    "instructions": Unsupported(("",), advice=_SYSTEM),
    **_each(Unsupported(("",)), "previous_response_id conversation"),
    "safe_prompt": Unsupported((False,)),
    "extra_body": Unsupported(({},), advice="write its fields next to the others"),  # a client's keyword, sent as it is
    **_each(Unsupported(("",), advice=_ADAPTER), "lora_path adapter_id"),
    "lora_request": Unsupported(({},), advice=_ADAPTER),
}

_SAMPLING = {
    **_each(Unsupported((False,)), "echo watermarking"),
    "num_beams": Unsupported((1,)),
    **_each(Unsupported((1.0,)), "typical_p tfs_z"),
    "do_sample": Unsupported((True,), instead="temperature"),
    **_each(Unsupported(("",)), "suffix custom_logit_processor"),
    "logits_processors": Unsupported(([],)),
    "stop_regex": Unsupported(("", [])),
    "no_stop_trim": Unsupported((False,), instead="include_stop_str_in_output"),
    "detokenize": Unsupported((True,)),
    **_each(Unsupported(), "task"),
    **_each(Unsupported((0,)), "no_repeat_ngram_size mirostat mirostat_mode"),
    **_each(Unsupported((0.0,)), "top_a dry_multiplier xtc_probability"),
    **_each(
        Unsupported(instead="max_tokens"),
        "max_new_tokens max_output_tokens max_completion_tokens n_predict num_predict",
    ),
    "min_new_tokens": Unsupported((0,), instead="min_tokens"),
    "repeat_penalty": Unsupported((1.0,), instead="repetition_penalty"),
    "stop_sequences": Unsupported(([],), instead="stop"),
    **_each(Unsupported(instead="seed"), "sampling_seed random_seed"),
}

_OURS = {
    **_each(Unsupported((False,)), "use_beam_search ignore_eos include_stop_str_in_output guided_json_object"),
    **_each(Unsupported((True,)), "skip_special_tokens spaces_between_special_tokens"),
    **_each(Unsupported((1,)), "best_of"),
    **_each(Unsupported((0,)), "min_tokens top_logprobs"),
    **_each(Unsupported((0.0,)), "min_p presence_penalty frequency_penalty"),
    **_each(Unsupported((1.0,)), "length_penalty repetition_penalty"),
    **_each(
        Unsupported(([],)),
        "stop_token_ids allowed_token_ids bad_words logprob_token_ids thinking_start_token_ids thinking_end_token_ids",
    ),
    "thinking_token_budget": Unsupported((-1,)),
    "repetition_detection": Unsupported(({},)),
    **_each(Unsupported(({},)), "logit_bias structured_outputs"),
    **_each(Unsupported(), "prompt_logprobs guided_choice guided_grammar guided_json guided_regex"),
}
"""Fields that some of the routes have."""

GENERATION_UNSUPPORTED: Mapping[str, Unsupported] = _PROMPT | _FORMATS | _SOURCES | _SAMPLING | _OURS
"""Unsupported fields of the routes that generate. A field that a route's model has is not one of them."""

COMPLETION_UNSUPPORTED = {
    **GENERATION_UNSUPPORTED,
    "messages": Unsupported(([],)),
    "top_logprobs": Unsupported((0,), instead="logprobs"),
}
CHAT_UNSUPPORTED = {**GENERATION_UNSUPPORTED, "prompt": Unsupported(("", []))}

MESSAGE_UNSUPPORTED: Mapping[str, Unsupported] = {
    "audio": Unsupported(),
    **_each(Unsupported(([],)), "images tools"),
    **_each(Unsupported((False,), advice=_CONTINUE), "prefix partial"),
}

IDLE: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "stream_options": ("stream", (None, False)),
    "tools": ("tool_choice", ("none",)),
    "functions": ("function_call", ("none",)),
}
"""Fields that mean nothing while another field has one of these values."""

QUIET: Mapping[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none",),
}
"""Values of harmless fields that ask for nothing; null, false and what is empty are others."""

_OPENAI = "include_obfuscation metadata parallel_tool_calls prediction prompt_cache_key prompt_cache_options \
prompt_cache_retention reasoning_effort safety_identifier service_tier store verbosity"
_VLLM = "assistant_tokens_mask early_stopping ec_transfer_params guided_decoding_backend include_reasoning \
kv_transfer_params media_io_kwargs mm_processor_kwargs request_id return_mm_kwargs return_token_offsets \
output_kind output_text_buffer_length routed_experts_prompt_start session_id skip_clone stream_interval \
token_offsets truncation_side vllm_xargs"
_SGLANG = "bootstrap_host bootstrap_port bootstrap_room custom_labels custom_params data_parallel_rank \
disagg_prefill_dp_rank extra_key images_config max_dynamic_patch min_dynamic_patch ngram_corpus_id \
return_cached_tokens_details rid routed_dp_rank routed_experts_start_len separate_reasoning stream_reasoning \
use_audio_in_video"
_ANTHROPIC = "context_management diagnostics inference_geo speed user_profile_id"
_OTHERS = "api_key cache_prompt enable_thinking keep_alive models plugins provider reasoning route tags thinking \
thinking_budget timeout timings_per_token transforms usage"
_MESSAGES = "annotations cache_control id index phase reasoning reasoning_details refusal status thinking_blocks \
timestamp type"

HARMLESS = frozenset(f"{_OPENAI} {_VLLM} {_SGLANG} {_ANTHROPIC} {_OTHERS} {_MESSAGES}".split())
"""Known names that may be ignored: labels of the metric, and no misspellings."""
