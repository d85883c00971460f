"""Metrics under vLLM's names, as its benchmark client reads them."""

import re

from prometheus_client.parser import text_string_to_metric_families

from outrider.platform.core.compat.vllm_metrics import SAME_NAMES, VLLM_PREFIX, vllm_names
from outrider.platform.core.messages import AdapterInfo, EngineStats, SpeculationCounts, SpeculationEntry
from outrider.platform.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from outrider.platform.http.observe.prometheus_metrics import Metrics

from .generation_helpers import Recorded

STATS = EngineStats(
    num_running=3,
    running_adapters=["json", "sql"],
    waiting_adapters=["support"],
    num_adapters=4,
    adapters=[
        AdapterInfo("sql", "/p", "d", 8, 8, "device", pinned=True),
        AdapterInfo("json", "/q", "e", 8, 8, "host"),
        AdapterInfo("support", "/r", "", 0, 0, "disk"),
    ],
    speculation=[
        SpeculationEntry("", "", SpeculationCounts(10, 30, 15, [9, 6, 0])),
        SpeculationEntry("sql", "acme", SpeculationCounts(2, 4, 3, [2, 1])),
    ],
)


def exposition(model: str | None) -> str:
    metrics = Metrics(model)
    metrics.max_loras = 4
    metrics.update(STATS)
    recorder = Recorded(metrics, "sql", "acme")
    for reason in (None, "stop"):
        completion = CompletionOutput(0, "a", [5, 6], finish_reason=reason)
        recorder.on_output(RequestOutput("r", None, [1, 2], [completion], reason is not None, RequestMetrics()))
    return metrics.render().decode()


def spec_decode_counts(text: str) -> tuple[dict[str, int], dict[int, int]]:
    """Sums as `vllm bench serve` makes them: over all lines, by parts of their names."""
    totals, positions = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}, {}
    for line in text.splitlines():
        if not line.startswith("vllm:spec_decode"):
            continue
        name, value = line.split()[0], int(float(line.split()[-1]))
        if "num_accepted_tokens_per_pos" in name:
            position = int(re.search(r'position="(\d+)"', line)[1])
            positions[position] = positions.get(position, 0) + value
        else:
            [key] = [key for key in totals if f"{key}_total" in name]
            totals[key] += value
    return totals, positions


def test_metrics_that_vllms_benchmark_reads() -> None:
    totals, positions = spec_decode_counts(exposition("demo"))
    assert totals == {"num_drafts": 12, "num_draft_tokens": 34, "num_accepted_tokens": 18}
    assert positions == {0: 11, 1: 7, 2: 0}


def test_each_name_is_there_twice_with_the_same_values() -> None:
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition("demo"))
        for sample in family.samples
    }
    copies = {name for name in SAME_NAMES if any(key[0].startswith(f"{VLLM_PREFIX}{name}") for key in samples)}
    assert copies == SAME_NAMES
    for (name, labels), value in samples.items():
        if not name.startswith("outrider:"):
            continue
        stem = name.removeprefix("outrider:")
        family = next((known for known in sorted(SAME_NAMES, key=len, reverse=True) if stem.startswith(known)), None)
        if family is None or stem.removeprefix(family) not in ("", "_total", "_bucket", "_count", "_sum"):
            continue
        same = tuple(sorted({**dict(labels), "model_name": "demo", "engine": "0"}.items()))
        for other in vllm_names(family):
            copy = samples[VLLM_PREFIX + stem.replace(family, other, 1), same]
            assert copy == value or family == "lora_requests_info"  # whose value is the time


def test_adapters_as_gateways_read_them() -> None:
    [line] = [line for line in exposition("demo").splitlines() if line.startswith("vllm:lora_requests_info{")]
    for label in ('max_lora="4"', 'running_lora_adapters="json,sql"', 'waiting_lora_adapters="support"'):
        assert label in line


def test_adapters_by_memory_as_routers_read_them() -> None:
    lines = [re.sub(r',?(engine|model_name)="\w+"', "", line) for line in exposition("demo").splitlines()]
    found = {line.removeprefix("vllm:") for line in lines if line.startswith("vllm:") and "_lora_adapters" in line}
    assert {
        "num_gpu_loaded_lora_adapters{} 1.0",
        "num_cpu_loaded_lora_adapters{} 2.0",
        "max_gpu_lora_adapters{} 4.0",
    } <= found
    loaded = sorted(line for line in lines if line.startswith("vllm:lora_adapter_loaded{"))
    assert [re.findall(r'(\w+)="(\w+)"', line) for line in loaded] == [
        [("adapter_name", "json"), ("level", "cpu"), ("pinned", "false")],
        [("adapter_name", "sql"), ("level", "gpu"), ("pinned", "true")],
    ]


def test_vllm_names_are_opt_in() -> None:
    assert "vllm:" not in exposition(None)
