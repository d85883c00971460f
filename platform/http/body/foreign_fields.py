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
    """Our field of the same meaning: where it is given too, the foreign one is ignored."""
    advice: str = "leave it out"
    """Advice in the error."""


_ADAPTER = "name the adapter in 'model'"
_CONTINUE = "send 'continue_final_message'"
_SYSTEM = "send a message with the role 'system'"


_PROMPT: dict[str, Unsupported] = {
    "tools": Unsupported(([],)),
    "functions": Unsupported(([],)),
    "documents": Unsupported(([],)),
    "truncate_prompt_tokens": Unsupported(),
    "prompt_truncate_len": Unsupported(),
}

TEMPLATE_UNSUPPORTED: Mapping[str, Unsupported] = _PROMPT
"""Fields that change a prompt, for `/tokenize`."""

_FORMATS = {
    "tool_choice": Unsupported(("none", "auto")),
    "function_call": Unsupported(("none", "auto")),
    "response_format": Unsupported(({"type": "text"},)),
    "structured_outputs": Unsupported(({},)),
    "structural_tag": Unsupported(("",)),
    "guided_json": Unsupported(("",)),
    "guided_json_object": Unsupported((False,)),
    "guided_regex": Unsupported(("",)),
    "guided_choice": Unsupported(([],)),
    "guided_grammar": Unsupported(("",)),
    "json_schema": Unsupported(("",)),
    "regex": Unsupported(("",)),
    "ebnf": Unsupported(("",)),
    "grammar": Unsupported(("",)),
    "format": Unsupported(("",)),
    "return_tokens_as_token_ids": Unsupported((False,)),
    "return_prompt_text": Unsupported((False,)),
    "return_prompt_token_ids": Unsupported((False,), instead="return_token_ids"),
    "return_hidden_states": Unsupported((False,)),
    "return_routed_experts": Unsupported((False,)),
    "return_meta_info": Unsupported((False,)),
    "logprob_token_ids": Unsupported(([],)),
    "moderation": Unsupported(),
}

_SOURCES = {
    "audio": Unsupported(),
    "modalities": Unsupported((["text"],)),
    "web_search_options": Unsupported(),
    "prompt_embeds": Unsupported(("", [])),
    "images": Unsupported(([],)),
    "image_data": Unsupported(([], "")),
    "multi_modal_data": Unsupported(({},)),
    "data_sources": Unsupported(([],)),
    "input_ids": Unsupported(([],)),
    "inputs": Unsupported(("",), instead="prompt"),
    "system": Unsupported(("", []), advice=_SYSTEM),
    "instructions": Unsupported(("",), advice=_SYSTEM),
    "session_params": Unsupported(({},)),
    "previous_response_id": Unsupported(("",)),
    "conversation": Unsupported(("",)),
    "safe_prompt": Unsupported((False,)),
    "extra_body": Unsupported(({},), advice="write its fields beside the others"),  # a client's keyword, sent as it is
    "parameters": Unsupported(({},)),
    "options": Unsupported(({},)),
    "lora_path": Unsupported(("",), advice=_ADAPTER),
    "lora_request": Unsupported(({},), advice=_ADAPTER),
    "adapter_id": Unsupported(("",), advice=_ADAPTER),
}

_SAMPLING = {
    "use_beam_search": Unsupported((False,)),
    "num_beams": Unsupported((1,)),
    "length_penalty": Unsupported((1.0,)),
    "do_sample": Unsupported((True,), instead="temperature"),
    "suffix": Unsupported(("",)),
    "echo": Unsupported((False,)),
    "logits_processors": Unsupported(([],)),
    "custom_logit_processor": Unsupported(("",)),
    "stop_regex": Unsupported(("", [])),
    "no_stop_trim": Unsupported((False,), instead="include_stop_str_in_output"),
    "detokenize": Unsupported((True,)),
    "repetition_detection": Unsupported(),
    "watermarking": Unsupported((False,)),
    "task": Unsupported(),
    "no_repeat_ngram_size": Unsupported((0,)),
    "typical_p": Unsupported((1.0,)),
    "tfs_z": Unsupported((1.0,)),
    "top_a": Unsupported((0.0,)),
    "mirostat": Unsupported((0,)),
    "mirostat_mode": Unsupported((0,)),
    "dry_multiplier": Unsupported((0.0,)),
    "xtc_probability": Unsupported((0.0,)),
    "max_new_tokens": Unsupported(instead="max_tokens"),
    "max_output_tokens": Unsupported(instead="max_tokens"),
    "max_completion_tokens": Unsupported(instead="max_tokens"),
    "n_predict": Unsupported(instead="max_tokens"),
    "num_predict": Unsupported(instead="max_tokens"),
    "min_new_tokens": Unsupported((0,), instead="min_tokens"),
    "repeat_penalty": Unsupported((1.0,), instead="repetition_penalty"),
    "stop_sequences": Unsupported(([],), instead="stop"),
    "sampling_seed": Unsupported(instead="seed"),
    "random_seed": Unsupported(instead="seed"),
}

GENERATION_UNSUPPORTED: Mapping[str, Unsupported] = _PROMPT | _FORMATS | _SOURCES | _SAMPLING
"""Unsupported fields of the routes that generate. A field that a route's model has is not one of them."""

COMPLETION_UNSUPPORTED = {
    **GENERATION_UNSUPPORTED,
    "messages": Unsupported(([],)),
    "top_logprobs": Unsupported((0,), instead="logprobs"),
}
CHAT_UNSUPPORTED = {**GENERATION_UNSUPPORTED, "prompt": Unsupported(("", []))}

MESSAGE_UNSUPPORTED: Mapping[str, Unsupported] = {
    "audio": Unsupported(),
    "images": Unsupported(([],)),
    "tools": Unsupported(([],)),
    "prefix": Unsupported((False,), advice=_CONTINUE),
    "partial": Unsupported((False,), advice=_CONTINUE),
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
_VLLM = "early_stopping ec_transfer_params guided_decoding_backend guided_whitespace_pattern include_reasoning \
kv_transfer_params media_io_kwargs mm_processor_kwargs request_id return_mm_kwargs return_token_offsets \
routed_experts_prompt_start session_id stream_interval thinking_token_budget truncation_side vllm_xargs"
_SGLANG = "bootstrap_host bootstrap_port bootstrap_room custom_labels custom_params data_parallel_rank \
disagg_prefill_dp_rank extra_key images_config max_dynamic_patch min_dynamic_patch ngram_corpus_id \
return_cached_tokens_details rid routed_dp_rank routed_experts_start_len separate_reasoning stream_reasoning \
use_audio_in_video"
_OTHERS = "api_key cache_prompt enable_thinking keep_alive models plugins provider reasoning route tags thinking \
thinking_budget timeout timings_per_token transforms usage"
_MESSAGES = "annotations cache_control id index phase reasoning reasoning_details refusal status thinking_blocks \
timestamp type"

HARMLESS = frozenset(f"{_OPENAI} {_VLLM} {_SGLANG} {_OTHERS} {_MESSAGES}".split())
"""Known names that may be ignored: labels of the metric, and no misspellings."""
