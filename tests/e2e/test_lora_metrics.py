"""Metrics of a real server's adapters."""

import pytest

from outrider.models.demo import demo_adapters

NAMES = sorted(demo_adapters())


@pytest.fixture(scope="module")
def small_server(start_server):
    """In host memory there is room for one adapter less than there are."""
    arguments = f"--max-loras 1 --max-cpu-loras {len(NAMES) - 1} --max-model-len 256 --max-num-seqs 4"
    server = start_server(*arguments.split(), "--speculative-config", '{"method": "off"}')
    with server.http() as http:
        for name in (*NAMES, NAMES[0], ""):
            body = {"model": name or "outrider-demo", "prompt": "Anna from Lisbon", "max_tokens": 4, "ignore_eos": True}
            http.post("/v1/completions", json=body).raise_for_status()
    return server


def test_latencies_are_counted_by_adapter(small_server):
    for metric in ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"):
        counts = [small_server.metric(metric, adapter=name) for name in (*NAMES, "")]
        assert counts == [2, *[1] * (len(NAMES) - 1), 1], metric
    assert small_server.metric("generation_tokens_total", adapter=NAMES[0]) == 8


def test_loads_evictions_and_tiers(small_server):
    levels = {level: small_server.metric("lora_adapters", level=level) for level in ("device", "host", "disk")}
    assert sum(levels.values()) == len(NAMES)
    assert levels["disk"] == 1
    assert levels["device"] >= 1
    assert small_server.metric("lora_adapter_loaded", adapter=NAMES[0], level="device", pinned="false") == 1
    assert small_server.metric("lora_evictions_total", level="host") >= 1
    # All at the start, and again what had been dropped before it was asked for.
    assert small_server.metric("lora_load_seconds_count") > len(NAMES)
    assert small_server.metric("lora_load_seconds_sum") > 0
    assert small_server.metric("lora_adapter_load_seconds", adapter=NAMES[0]) > 0
    assert small_server.metric("lora_load_failures_total") == 0


def test_loads_and_evictions_of_each_adapter_add_up(small_server):
    loads = {name: small_server.metric("lora_adapter_loads_total", adapter=name, level="host") for name in NAMES}
    assert min(loads.values()) >= 1
    assert max(loads.values()) > 1
    assert sum(loads.values()) == small_server.metric("lora_load_seconds_count")
    for level in ("device", "host"):
        total = small_server.metric("lora_evictions_total", level=level)
        assert small_server.metric("lora_adapter_evictions_total", level=level) == total
    assert small_server.metric("lora_adapter_loads_total", level="device") >= len(NAMES)
    assert small_server.metric("lora_max_loras") == 1


def test_bytes_of_adapters_are_the_sum_of_each(small_server):
    used, rows = small_server.metric("lora_rows_used"), small_server.metric("lora_rows")
    assert 0 < used <= rows
    in_memory = [name for name in NAMES if small_server.metric("lora_adapter_loaded", adapter=name)]
    sizes = [small_server.metric("lora_adapter_bytes", adapter=name) for name in in_memory]
    assert len(sizes) == len(NAMES) - 1
    assert min(sizes) > 0
    assert small_server.metric("lora_host_bytes") == sum(sizes)


def test_idle_queues_show_every_reason(small_server):
    text = small_server.http().get("/metrics").text
    for reason in ("capacity", "adapter_loading", "adapter_rows", "max_loras"):
        assert f'outrider:num_requests_waiting_by_reason{{reason="{reason}"}} 0.0' in text
    assert 'outrider:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""}' in text


def test_an_unloaded_adapter_gives_its_memory_back(small_server):
    before = small_server.metric("lora_host_bytes")
    size = small_server.metric("lora_adapter_bytes", adapter=NAMES[0])
    with small_server.http() as http:
        http.post("/v1/unload_lora_adapter", json={"lora_name": NAMES[0]}).raise_for_status()
    assert small_server.metric("lora_host_bytes") == before - size < before
    assert small_server.metric("lora_adapter_loaded", adapter=NAMES[0]) == 0
    left = sum(small_server.metric("lora_adapters", level=level) for level in ("device", "host", "disk"))
    assert left == len(NAMES) - 1
