"""`/health`, `/version`, `/metrics`, and request ids."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

import outrider
from outrider.platform.core.memory_usage import resident_memory_bytes
from outrider.platform.core.messages import AdapterInfo, EngineStats, SpeculationCounts, SpeculationEntry
from outrider.platform.http.observe import metric_families as metrics_module
from outrider.platform.http.observe import series_labels as labels_module
from outrider.platform.http.observe.prometheus_metrics import Metrics

from .generation_helpers import Recorded


def samples(http) -> dict:
    """(name, sorted labels) -> value; fails on an exposition that Prometheus could not read."""
    text = http.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_is_ready(http):
    response = http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})


@pytest.mark.parametrize("state", ["starting", "restarting", "draining", "stopped"])
def test_health_gives_the_reason(http, llm, state):
    llm.state = state
    response = http.get("/health")
    assert response.status_code == 503
    assert response.json()["status"] == state
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert "retry-after" in response.headers


def test_the_server_drains_before_its_engine_does(http, llm):
    http.app.state.serving.draining = True
    assert http.get("/health").json()["status"] == "draining"
    assert http.post("/v1/completions", {"prompt": "x"}).json()["error"]["type"] == "ShuttingDownError"


def test_version(http):
    assert http.get("/version").json() == {"version": outrider.__version__}


def test_the_root_redirects_browsers_and_lists_routes_for_programs(http):
    browser = http.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (browser.status_code, browser.headers["location"]) == (307, "console")
    assert http.get("/" + browser.headers["location"]).status_code == 200
    told = http.get("/").json()
    assert told["version"] == outrider.__version__
    assert {"/v1/chat/completions", "/console"} <= set(told["routes"])
    documented = http.get("/openapi.json").json()["paths"]
    for path in told["routes"]:
        assert path in documented or http.get(path).status_code == 200, path


def test_request_ids_come_back(http):
    assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/nowhere", headers={"X-Request-Id": "abc-2"}).headers["x-request-id"] == "abc-2"
    generated = http.get("/health", headers={"X-Request-Id": "with space"}).headers["x-request-id"]
    assert len(generated) == 32
    assert http.get("/health").headers["x-request-id"] != generated


def test_engine_metrics(http, llm):
    llm.snapshot = EngineStats(
        num_running=3, num_waiting=2, num_waiting_by_reason={"capacity": 2}, kv_cache_usage=0.25,
        prefix_cache_queries=100, prefix_cache_hits=40, kv_host_bytes=7,
        drafters=["eagle3", "ngram"],
        speculation=[
            SpeculationEntry("", "", SpeculationCounts(4, 16, 9, [4, 3, 2], [6, 0, 0, 0, 4], [3, 1], [10, 3], 1.5)),
            SpeculationEntry("sql", "", SpeculationCounts(1, 4, 1, [1])),
            SpeculationEntry("sql", "acme", SpeculationCounts(2, 8, 7, [2, 2])),
            SpeculationEntry("sql", "default", SpeculationCounts(5, 5, 5, [5])),
        ],
        adapters=[AdapterInfo("sql", "/p", "d", 8, 8, "device", pinned=True)],
        running_adapters=["a", "b"], waiting_adapters=["c"], lora_load_seconds=[0.002, 3.0],
    )  # fmt: skip
    found = samples(http)
    base, sql = (("adapter", ""), ("tenant", "default")), (("adapter", "sql"), ("tenant", "default"))
    acme = (("adapter", "sql"), ("tenant", "acme"))
    expected = {
        ("outrider:num_requests_running", ()): 3,
        ("outrider:num_requests_waiting", ()): 2,
        ("outrider:num_requests_waiting_by_reason", (("reason", "capacity"),)): 2,
        ("outrider:kv_cache_usage_perc", ()): 0.25,
        ("outrider:prefix_cache_queries_total", ()): 100,
        ("outrider:prefix_cache_hits_total", ()): 40,
        ("outrider:kv_host_bytes", ()): 7,
        ("outrider:spec_decode_num_drafts_total", base): 4,
        ("outrider:spec_decode_num_draft_tokens_total", base): 16,
        ("outrider:spec_decode_num_accepted_tokens_total", sql): 6,  # those without a tenant, and a tenant of that name
        ("outrider:spec_decode_num_accepted_tokens_total", acme): 7,
        ("outrider:spec_decode_num_accepted_tokens_per_pos_total", (base[0], ("position", "2"), base[1])): 2,
        ("outrider:spec_decode_steps_total", (base[0], ("drafter", "off"), base[1])): 6,
        ("outrider:spec_decode_steps_total", (base[0], ("drafter", "eagle3"), base[1])): 3,
        ("outrider:spec_decode_tokens_total", (base[0], ("drafter", "off"), base[1])): 6,
        ("outrider:spec_decode_tokens_total", (base[0], ("drafter", "eagle3"), base[1])): 10,
        ("outrider:spec_decode_tokens_total", (base[0], ("drafter", "ngram"), base[1])): 3,
        ("outrider:spec_decode_recent_drafts", base): 1.5,
        ("outrider:lora_adapter_loaded", (("adapter", "sql"), ("level", "device"), ("pinned", "true"))): 1,
        ("outrider:lora_load_seconds_count", ()): 2,
        ("outrider:lora_load_seconds_bucket", (("le", "0.005"),)): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    labels = (("max_lora", "4"), ("running_lora_adapters", "a,b"), ("waiting_lora_adapters", "c"))
    assert found[("outrider:lora_requests_info", labels)] > 0


def test_request_metrics(http):
    http.load_adapter("sql")
    for model in ("base", "sql", "sql"):
        http.post("/v1/completions", {"model": model, "prompt": "ab", "max_tokens": 3})
    http.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True})
    found = samples(http)
    base, sql = (("adapter", ""), ("tenant", "default")), (("adapter", "sql"), ("tenant", "default"))
    assert found[("outrider:prompt_tokens_total", sql)] == 6
    assert found[("outrider:generation_tokens_total", sql)] == 6
    assert found[("outrider:generation_tokens_total", base)] == 8
    assert found[("outrider:time_to_first_token_seconds_count", sql)] == 2
    assert found[("outrider:inter_token_latency_seconds_count", sql)] == 4
    assert found[("outrider:e2e_request_latency_seconds_count", base)] == 2
    assert found[("outrider:request_success_total", (("adapter", "sql"), ("finished_reason", "length"), base[1]))] == 2
    assert found[("outrider:request_success_total", (("adapter", ""), ("finished_reason", "stop"), base[1]))] == 1


def test_lengths_and_phases_of_requests(http):
    http.load_adapter("sql")
    http.post("/v1/completions", {"model": "sql", "prompt": "ab", "max_tokens": 3, "n": 2})
    http.post("/v1/completions", {"model": "base", "prompt": "abcd", "max_tokens": 1})
    found = samples(http)
    base, sql = (("adapter", ""), ("tenant", "default")), (("adapter", "sql"), ("tenant", "default"))

    def of(name, labels):
        return found[f"outrider:{name}_count", labels], found[f"outrider:{name}_sum", labels]

    prompt, generated = found[("outrider:prompt_tokens_total", sql)], found[("outrider:generation_tokens_total", sql)]
    assert of("request_prompt_tokens", sql) == (1, prompt)
    assert of("request_generation_tokens", sql) == (2, generated)  # a sequence each
    assert of("request_generation_tokens", base) == (1, 1)
    assert of("request_time_per_output_token_seconds", sql)[0] == 2
    assert ("outrider:request_time_per_output_token_seconds_count", base) not in found  # one token has no pace
    for labels in (base, sql):
        end = of("e2e_request_latency_seconds", labels)[1]
        parts = [of(f"request_{name}_time_seconds", labels) for name in ("queue", "prefill", "decode")]
        assert [count for count, _ in parts] == [1, 1, 1]
        assert sum(seconds for _, seconds in parts) == pytest.approx(end, abs=0.05)


def test_process_metrics(http):
    found = samples(http)
    assert found["process_resident_memory_bytes", ()] > 1 << 20
    assert found["process_start_time_seconds", ()] > 1e9
    assert {"process_cpu_seconds_total", "process_open_fds", "process_max_fds"} <= {name for name, _ in found}


def test_adapters_by_tier_and_their_bytes(http, llm):
    llm.snapshot = EngineStats(
        num_waiting_by_reason={"adapter_loading": 3}, num_adapters=2000,
        adapters=[
            AdapterInfo("sql", "/p", "d", 8, 8, "device", num_running=2, num_waiting=1, num_bytes=500,
                        load_seconds=0.25, pinned=True),
            AdapterInfo("json", "/q", "e", 16, 16, "host", num_bytes=1000, load_seconds=0.5),
            AdapterInfo("sql", "/p2", "f", 8, 8, "host", num_running=1, num_bytes=30, load_seconds=0.125),
            AdapterInfo("late", "/r", "", 0, 0, "disk", num_waiting=2),
        ],
        lora_host_bytes=1530, lora_rows_used=8, lora_rows=64, lora_load_failures=2, lora_evictions={"host": 5},
    )  # fmt: skip
    expected = {
        ("num_requests_waiting_by_reason", "reason", "adapter_loading"): 3,
        ("num_requests_waiting_by_reason", "reason", "adapter_rows"): 0,
        ("num_requests_waiting_by_reason", "reason", "capacity"): 0,
        ("lora_adapters", "level", "device"): 1,
        ("lora_adapters", "level", "host"): 2,
        ("lora_adapters", "level", "disk"): 1997,
        ("lora_evictions_total", "level", "device"): 0,
        ("lora_evictions_total", "level", "host"): 5,
        ("lora_adapter_bytes", "adapter", "sql"): 530,  # what still runs on a content that was replaced counts too
        ("lora_adapter_bytes", "adapter", "late"): 0,
        ("lora_adapter_load_seconds", "adapter", "sql"): 0.25,
    }
    expected = {(f"outrider:{name}", ((label, value),)): number for (name, label, value), number in expected.items()}
    expected |= {
        ("outrider:lora_host_bytes", ()): 1530,
        ("outrider:lora_rows_used", ()): 8,
        ("outrider:lora_rows", ()): 64,
        ("outrider:lora_load_failures_total", ()): 2,
        ("outrider:lora_requests", (("adapter", "sql"), ("state", "running"))): 3,
        ("outrider:lora_requests", (("adapter", "late"), ("state", "waiting"))): 2,
        ("outrider:lora_adapter_loaded", (("adapter", "late"), ("level", "disk"), ("pinned", "false"))): 1,
    }
    found = samples(http)
    assert {key: found.get(key) for key in expected} == expected


def test_adapters_beyond_the_bound_are_added_up(http, llm, monkeypatch):
    monkeypatch.setattr(labels_module, "MAX_ADAPTERS", 1)
    monkeypatch.setattr(metrics_module, "MAX_NAMES", 2)
    http.app.state.serving.metrics = Metrics()
    infos = [AdapterInfo(name, "/p", name, 8, 8, "host", num_bytes=10, load_seconds=t) for t, name in enumerate("abc")]
    llm.snapshot = EngineStats(num_adapters=3, adapters=infos, waiting_adapters=["a", "b", "c"])
    found = samples(http)
    loaded = {dict(labels)["adapter"]: n for (name, labels), n in found.items() if name.endswith("adapter_loaded")}
    assert loaded == {"a": 1, "other": 2}
    assert found["outrider:lora_adapter_bytes", (("adapter", "other"),)] == 20
    assert found["outrider:lora_adapter_load_seconds", (("adapter", "other"),)] == 2
    (info,) = [dict(labels) for name, labels in found if name.endswith("requests_info")]
    assert info["waiting_lora_adapters"] == "a,b,other"


def test_tenants_beyond_the_bound_share_a_label(monkeypatch):
    monkeypatch.setattr(labels_module, "MAX_TENANTS", 2)
    metrics = Metrics()
    for tenant in ("", "acme", "more", "most", "acme"):
        Recorded(metrics, "sql", tenant).on_end("stop")
    families = text_string_to_metric_families(metrics.render().decode())
    found = {
        s.labels["tenant"]: s.value for f in families for s in f.samples if s.name.endswith("request_success_total")
    }
    assert found == {"default": 1, "acme": 2, "other": 2}


def test_adapters_beyond_the_bound_share_a_label(http, llm, monkeypatch):
    """The base model keeps its own, and the engine's counts have the labels of the requests'."""
    monkeypatch.setattr(labels_module, "MAX_ADAPTERS", 2)
    http.app.state.serving.metrics = metrics = Metrics()
    names = ("a", "b", "c", "d", "a")
    for name in (*names, ""):
        Recorded(metrics, name, "").on_end("stop")
    llm.snapshot = EngineStats(
        speculation=[SpeculationEntry(name, "", SpeculationCounts(1, 1, 1, [1])) for name in ("d", "c", "", "b", "a")]
    )
    found = {name: {} for name in ("outrider:request_success_total", "outrider:spec_decode_num_drafts_total")}
    for (name, labels), value in samples(http).items():
        if name in found:
            found[name][dict(labels)["adapter"]] = value
    assert [*found.values()] == [{"a": 2, "b": 1, "other": 2, "": 1}, {"a": 1, "b": 1, "other": 2, "": 1}]


def test_label_names_in_the_exposition_are_bounded():
    metrics = Metrics()

    def size_after(count):
        for i in range(count):
            Recorded(metrics, f"adapter-{i}", "").on_end("stop")
        return metrics.render().count(b"\n")

    assert size_after(labels_module.MAX_ADAPTERS + 1) == size_after(3 * labels_module.MAX_ADAPTERS)


def test_counters_do_not_fall_when_the_engine_starts_again(http, llm):
    def snapshot(run_id, times, *adapters):
        llm.snapshot = EngineStats(
            run_id=run_id, num_running=times, num_preemptions=times, prefix_cache_queries=10 * times,
            prefix_cache_hits=3 * times, kv_host_hits=4 * times,
            lora_load_failures=times, lora_evictions={"host": 2 * times},
            speculation=[SpeculationEntry(name, "t", SpeculationCounts(times, 4 * times, 2 * times, [times, times]))
                         for name in adapters],
        )  # fmt: skip
        own = {key: value for key, value in samples(http).items() if key[0].startswith("outrider:")}
        return {key: value for key, value in own.items() if key[0] != "outrider:lora_requests_info"}  # a time

    first = snapshot("1", 2, "", "sql")
    assert snapshot("1", 2, "", "sql") == first, "the same run is not counted twice"
    snapshot("1", 5, "", "sql")
    second = snapshot("2", 0)
    third = snapshot("2", 1, "sql", "json")
    labels = {name: (("adapter", name), ("tenant", "t")) for name in ("", "sql", "json")}
    expected = {
        ("outrider:num_preemptions_total", ()): (5, 6),
        ("outrider:prefix_cache_queries_total", ()): (50, 60),
        ("outrider:prefix_cache_hits_total", ()): (15, 18),
        ("outrider:kv_host_hits_total", ()): (20, 24),
        ("outrider:num_requests_running", ()): (0, 1),
        ("outrider:lora_load_failures_total", ()): (5, 6),
        ("outrider:lora_evictions_total", (("level", "host"),)): (10, 12),
        ("outrider:spec_decode_num_drafts_total", labels[""]): (5, 5),
        ("outrider:spec_decode_num_draft_tokens_total", labels["sql"]): (20, 24),
        ("outrider:spec_decode_num_accepted_tokens_total", labels["sql"]): (10, 12),
        ("outrider:spec_decode_num_drafts_total", labels["json"]): (None, 1),
        (
            "outrider:spec_decode_num_accepted_tokens_per_pos_total",
            (labels["sql"][0], ("position", "1"), labels["sql"][1]),
        ): (5, 6),
    }
    assert {key: (second.get(key), third.get(key)) for key in expected} == expected
    fourth = snapshot("3", 0)
    counters = {key for key in third if key[0].endswith("_total")}
    assert {key: fourth[key] for key in counters} == {key: third[key] for key in counters}


def test_failed_requests_are_counted_and_refused_ones_are_not(http, llm):
    llm.fail_after = 1
    http.post("/v1/completions", {"prompt": "ab"})
    http.post("/v1/completions", {"prompt": "ab", "temperature": -1})
    counts = {dict(labels)["finished_reason"]: v for (name, labels), v in samples(http).items() if "success" in name}
    assert counts == {"error": 1}


def test_metrics_outlive_the_engine(http, llm):
    llm.snapshot = EngineStats(num_running=7)
    samples(http)

    async def dead():
        raise outrider.platform.core.errors.EngineDeadError("dead")

    llm.stats = dead
    assert samples(http)[("outrider:num_requests_running", ())] == 7


COUNTERS = {
    "kv_host_hits",
    "prefix_cache_hits", "prefix_cache_queries", "prompt_tokens", "generation_tokens", "request_success",
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "spec_decode_steps", "spec_decode_tokens", "lora_adapter_loads",
    "lora_adapter_evictions",
    "lora_evictions", "lora_load_failures", "kv_event_batches", "kv_event_batches_dropped",
}  # fmt: skip
GAUGES = {
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "kv_host_bytes", "engine_resident_memory_bytes",
    "lora_requests_info", "lora_adapter_loaded", "lora_adapters", "lora_rows", "lora_rows_used", "lora_host_bytes",
    "lora_requests", "lora_adapter_bytes", "lora_adapter_load_seconds", "spec_decode_recent_drafts", "lora_max_loras",
}  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "lora_load_seconds",
}  # fmt: skip


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "kind", "parse"),
    [
        ("*/*", "text/plain; version=0.0.4", text_string_to_metric_families),
        ("text/plain; escaping=dots", "text/plain; version=0.0.4", text_string_to_metric_families),
        (PROMETHEUS, "application/openmetrics-text; version=1.0.0", openmetrics_families),
    ],
)
def test_names_are_the_same_for_every_scraper(http, accept, kind, parse):
    http.post("/v1/completions", {"prompt": "ab", "max_tokens": 3})
    response = http.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"] == f"{kind}; charset=utf-8"
    families = list(parse(response.text))
    found = {family.name: family.type for family in families}
    samples = {sample.name: sample.value for family in families for sample in family.samples if len(sample.labels) < 3}
    assert samples["outrider:generation_tokens_total"] == 3
    expected = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    expected |= dict.fromkeys(HISTOGRAMS, "histogram")
    assert {name: found.get(f"outrider:{name}") for name in expected} == expected


@pytest.mark.parametrize(
    ("encoding", "is_gzip"),
    [
        *(("gzip", True), ("gzip, deflate, br", True), ("br;q=1.0, GZIP ; q=0.2", True), ("*", True)),
        *(("", False), ("identity", False), ("gzip;q=0", False), ("gzip;q=0.0, *;q=0", False), ("xgzip", False)),
    ],
)
def test_the_exposition_may_be_compressed(http, encoding, is_gzip):
    response = http.get("/metrics", headers={"Accept-Encoding": encoding})
    assert response.headers.get("content-encoding") == ("gzip" if is_gzip else None)
    assert "outrider:num_requests_running" in response.text
    assert "Accept-Encoding" in response.headers["vary"]


def test_the_memory_of_the_engine(http, llm):
    llm.snapshot = EngineStats(resident_memory_bytes=7 << 20)
    assert samples(http)["outrider:engine_resident_memory_bytes", ()] == 7 << 20
    assert resident_memory_bytes() > 10 << 20


def test_bodies_are_described(http):
    description = http.get("/openapi.json").json()
    body = description["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    properties = body["content"]["application/json"]["schema"]["properties"]
    assert {"messages", "temperature", "speculative"} <= set(properties)
    assert "$ref" not in str(properties)
