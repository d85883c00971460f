"""`/admin/v1/stats`, in front of a fake engine."""

import asyncio
import time

import pytest

from outrider.platform.core.errors import EngineDeadError
from outrider.platform.core.messages import AdapterInfo, EngineStats, SpeculationCounts, SpeculationEntry
from outrider.platform.http import serving_state
from outrider.platform.http.console import statistics as statistics_module
from outrider.platform.http.console.acceptance_split import AcceptanceTotals
from outrider.platform.http.console.statistics import Statistics


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """Every call takes a snapshot, unless the test says otherwise."""
    monkeypatch.setattr(statistics_module, "MIN_INTERVAL", 0.0)


def stats(http, history: int = 0, **options) -> dict:
    response = http.get("/admin/v1/stats", params={"history": history} if history else None, **options)
    assert response.status_code == 200, response.text
    return response.json()


def bearer(key: str) -> dict:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_only_admins_see_them(make_http):
    http = make_http(api_keys=("user",), admin_api_keys=("admin",))
    assert http.get("/admin/v1/stats").status_code == 401
    assert http.get("/admin/v1/stats", **bearer("user")).status_code == 403
    assert stats(http, **bearer("admin"))["server"]["state"] == "ready"


def test_the_uptime_is_the_servers(http, monkeypatch):
    """Not the time since the console was first looked at."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 5000)
    assert 4990 < stats(http)["server"]["uptime"] < 5100


def test_statistics_of_the_engine(http, llm):
    llm.num_restarts = 2
    llm.snapshot = EngineStats(
        num_running=3, num_waiting=2, num_waiting_by_reason={"capacity": 2}, kv_cache_usage=0.25, num_preemptions=4,
        prefix_cache_queries=100, prefix_cache_hits=40, lora_rows=64, lora_rows_used=24, lora_host_bytes=1000,
        num_adapters=7, lora_load_failures=1, drafters=["ngram"],
        adapters=[
            AdapterInfo("sql", "/p", "d", 8, 8, "device", pinned=True, num_running=2, draft="loaded", num_bytes=600),
            AdapterInfo("json", "/q", "e", 16, 16, "host", num_bytes=400),
        ],
        speculation=[SpeculationEntry("", "t", SpeculationCounts(4, 16, 8, [4, 3, 1, 0], [6, 0, 0, 0, 4], [4], [12]))],
    )  # fmt: skip
    found = stats(http)
    assert found["server"] | {"uptime": 0, "snapshot_age": 0, "version": ""} == {
        "state": "ready", "version": "", "uptime": 0, "engine_restarts": 2, "snapshot_age": 0, "model": "base",
        "architecture": "LlamaForCausalLM", "dtype": "float32", "device": "cpu", "num_parameters": 1_234_567,
        "max_model_len": 64, "speculation": "ngram, 3 drafts a step", "num_kv_blocks": 100, "block_size": 16,
        "has_tenants": False,
    }  # fmt: skip
    assert found["queue"] == {"running": 3, "waiting": 2, "waiting_by_reason": {"capacity": 2}, "preemptions": 4}
    assert found["kv_cache"] == {"usage": 0.25, "prefix_queries": 100, "prefix_hits": 40}
    assert found["lora"] == {
        "rows": 64, "rows_used": 24, "host_bytes": 1000, "registered": 7, "on_device": 1, "in_host_memory": 1,
        "load_failures": 1,
    }  # fmt: skip
    assert found["speculation"] == {
        "drafts": 4, "draft_tokens": 16, "accepted_tokens": 8, "rate": 0.5, "length": 3.0,
        "per_position": [1.0, 0.75, 0.25, 0.0],
    }  # fmt: skip
    assert found["tokens_by_drafter"] == {"off": 6, "ngram": 12}
    base, sql, json = found["adapters"]
    assert (base["name"], base["tier"], base["acceptance"]["length"]) == ("", None, 3.0)
    assert (sql["name"], sql["tier"], sql["rows"], sql["pinned"], sql["running"]) == ("sql", "device", 8, True, 2)
    assert (json["name"], json["bytes"], json["acceptance"]) == ("json", 400, None)
    live = found["live"]
    assert (live["running"], live["waiting"], live["kv_cache_usage"], live["lora_rows_used"]) == (3, 2, 0.25, 24)
    assert found["history"] is None


def test_requests_are_in_the_live_numbers(http, monkeypatch):
    recent = http.app.state.serving.metrics.recent
    now = [5000.0]
    recent._clock = lambda: now[0]
    http.load_adapter("sql")
    for model in ("base", "sql", "sql"):
        http.post("/v1/completions", {"model": model, "prompt": "ab", "max_tokens": 5})
    now[0] += 1
    found = stats(http)
    assert found["live"]["output_tokens_per_second"] == 3
    assert found["live"]["prompt_tokens_per_second"] == 9 / 5
    assert found["live"]["requests_per_second"] == 3 / 5
    assert (found["live"]["ttft_count"], found["live"]["itl_count"]) == (3, 12)
    assert 0 < found["live"]["itl_p50"] <= found["live"]["itl_p99"] < 10
    assert {a["name"]: a["output_tokens_per_second"] for a in found["adapters"]} == {"": 1, "sql": 2}
    assert found["tenants"] == [{"tenant": "default", "output_tokens_per_second": 3}]


def test_history(http, llm):
    llm.snapshot = EngineStats(num_running=5)
    found = stats(http, history=60)
    times = [point["time"] for point in found["history"]]
    assert len(times) == 60
    assert times == list(range(times[0], times[0] + 60))
    assert found["history"][-1] == found["live"]
    assert found["history"][-1]["running"] == 5
    assert found["history"][0]["running"] is None, "no snapshot was taken then"


@pytest.mark.parametrize("history", ["-1", "301", "x"])
def test_an_invalid_history_is_refused(http, history):
    response = http.get("/admin/v1/stats", params={"history": history})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"
    assert "history" in response.json()["error"]["message"]


def test_statistics_are_in_the_api_description(http):
    operation = http.get("/openapi.json").json()["paths"]["/admin/v1/stats"]["get"]
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Stats")


def test_many_consoles_share_one_snapshot(http, llm, monkeypatch):
    monkeypatch.setattr(statistics_module, "MIN_INTERVAL", 60.0)
    calls = 0

    async def slow() -> EngineStats:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        return EngineStats(num_running=calls)

    llm.stats = slow

    async def ask() -> list[bytes]:
        statistics = Statistics(http.app.state.serving)
        leaving = asyncio.create_task(statistics.json())
        await asyncio.sleep(0)
        leaving.cancel()  # a client that goes does not end what others wait for
        return [*await asyncio.gather(*(statistics.json() for _ in range(20))), await statistics.json()]

    answers = asyncio.run(ask())
    assert calls == 1
    assert len(set(answers)) == 1
    assert b'"running":1' in answers[0]


def test_the_last_snapshot_stays_while_the_engine_is_away(http, llm):
    llm.snapshot = EngineStats(num_running=7)
    stats(http)

    async def dead() -> EngineStats:
        raise EngineDeadError("dead")

    llm.stats, llm.state = dead, "restarting"
    found = stats(http)
    assert (found["server"]["state"], found["queue"]["running"]) == ("restarting", 7)
    llm.state = "ready"  # the engine dies while it is asked
    assert stats(http)["queue"]["running"] == 7


def test_an_engine_that_does_not_answer(http, llm, monkeypatch):
    monkeypatch.setattr(serving_state, "STATS_TIMEOUT", 0.01)
    llm.stats = lambda: asyncio.sleep(60)
    assert stats(http)["server"]["snapshot_age"] is None


def test_thousands_of_adapters_are_not_all_sent(http, llm, monkeypatch):
    monkeypatch.setattr(statistics_module, "MAX_ADAPTERS", 3)
    llm.snapshot = EngineStats(
        adapters=[AdapterInfo(f"a{i}", "/p", "d", 8, 8, "host", num_running=i) for i in range(10)]
    )
    found = stats(http)
    assert [adapter["name"] for adapter in found["adapters"]] == ["", "a9", "a8"]
    assert found["adapters_left_out"] == 8


def test_adapters_of_tenants_have_names_for_people(http, llm):
    llm.snapshot = EngineStats(
        adapters=[AdapterInfo("\x1facme\x1fsql", "/p", "d", 8, 8, "device")],
        speculation=[SpeculationEntry("\x1facme\x1fsql", "acme", SpeculationCounts(1, 2, 1, [1, 0]))],
    )
    (adapter,) = [a for a in stats(http)["adapters"] if a["name"]]
    assert (adapter["name"], adapter["tier"], adapter["acceptance"]["rate"]) == ("acme/sql", "device", 0.5)


# --- with and without draft weights ---


def snapshot(accepted: int, draft: str, run_id: str = "1", *, drafts: int | None = None) -> EngineStats:
    counts = SpeculationCounts(accepted if drafts is None else drafts, 4 * accepted, accepted, [accepted])
    return EngineStats(
        run_id=run_id,
        adapters=[AdapterInfo("sql", "/p", "d", 8, 8, "device", draft=draft)],
        speculation=[SpeculationEntry("sql", "a", counts), SpeculationEntry("sql", "b", counts)],
    )


def accepted(totals: AcceptanceTotals) -> tuple[int, int]:
    """(with draft weights, without)"""
    split = totals.by_adapter["sql"]
    return split.with_draft_weights.num_accepted_tokens, split.without_draft_weights.num_accepted_tokens


def test_acceptance_is_separate_for_each_draft_weights():
    totals = AcceptanceTotals()
    totals.update(snapshot(10, ""))
    assert accepted(totals) == (0, 20)
    totals.update(snapshot(12, ""))
    totals.update(snapshot(15, "loaded"))  # what came before the change was seen
    assert accepted(totals) == (0, 30)
    totals.update(snapshot(25, "loaded"))
    assert accepted(totals) == (20, 30)
    totals.update(snapshot(26, "rank 64 is more than the engine takes"))
    assert accepted(totals) == (22, 30)
    assert totals.by_adapter["sql"].total.num_accepted_tokens == 52
    assert totals.total().num_accepted_tokens == 52
    assert totals.total().accepted_per_pos == [52]


def test_acceptance_goes_on_when_the_engine_starts_again():
    totals = AcceptanceTotals()
    totals.update(snapshot(10, "loaded"))
    totals.update(snapshot(1, "loaded", "2"))
    totals.update(snapshot(3, "loaded", "2"))
    assert accepted(totals) == (26, 0)


def test_adapters_that_come_and_go_are_forgotten():
    """A tenant may load and unload any number, each by another name."""
    totals = AcceptanceTotals()
    for number in range(20):
        infos = [AdapterInfo(name, "/p", "d", 8, 8, "host") for name in (f"a{number}", "kept")]
        totals.update(EngineStats(adapters=infos))
    assert totals._has_draft.keys() == {"a19", "kept"}
