"""Names of metrics in vLLM. Those listed have the same meaning there and here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

VLLM_PREFIX = "vllm:"

SAME_NAMES = frozenset(
    """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
    prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens request_success
    time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds request_time_per_output_token_seconds
    request_prompt_tokens request_generation_tokens spec_decode_num_drafts spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos lora_requests_info
    """.split()
)
"""Names without their prefix that are the same here and there."""

OLDER_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
"""Names that older dashboards use, by the present ones."""


def vllm_names(name: str) -> list[str]:
    """VLLM's names, the older one last, of a metric of ours; both without a prefix. Empty if vLLM has none."""
    if name not in SAME_NAMES:
        return []
    return [name, *([OLDER_NAMES[name]] if name in OLDER_NAMES else [])]


_LEVELS = {"device": "gpu", "host": "cpu"}


def residency(
    name: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values by vLLM's name of a metric that says where adapters are. An adapter on the device counts as on
    the host, too. Empty for another metric."""
    if name == "lora_max_loras":
        return {"max_gpu_lora_adapters": [({}, value) for _, value in samples]}
    if name == "lora_adapters":
        counts = {labels["level"]: value for labels, value in samples}
        held = {"gpu": counts["device"], "cpu": counts["device"] + counts["host"]}
        return {f"num_{level}_loaded_lora_adapters": [({}, count)] for level, count in held.items()}
    if name == "lora_adapter_loaded":
        found = [
            ({"adapter_name": at["adapter"], "level": _LEVELS[at["level"]], "pinned": at["pinned"]}, value)
            for at, value in samples
            if at["level"] in _LEVELS
        ]
        return {"lora_adapter_loaded": found}
    return {}
