"""Labels of tenants and of their own adapters: as people know them, and of bounded number."""

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.platform.core.adapter_names import MARK, engine_name, label_text, public_text, split_engine_name
from outrider.platform.core.lora_request import LoRARequest, mix_of
from outrider.platform.core.messages import AdapterInfo, EngineStats, LearningEntry, SpeculationCounts, SpeculationEntry
from outrider.platform.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from outrider.platform.http.app import create_app
from outrider.platform.http.observe import series_labels
from outrider.platform.http.observe.metric_families import tenancy_families
from outrider.platform.http.observe.prometheus_metrics import Metrics
from outrider.platform.http.observe.series_labels import SeriesLabels
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts.principal import Principal
from outrider.platform.tenancy.ledger.ledger import LedgerStatus
from outrider.platform.tenancy.limits.queue_bound import QueueBound

from .generation_helpers import Recorded

OWN = engine_name("acme", "own")


def samples(metrics):
    return {
        (sample.name.removeprefix("outrider:"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_names():
    assert engine_name("", "sql") == "sql"
    assert split_engine_name("sql") == ("", "sql")
    assert split_engine_name(OWN) == ("acme", "own")
    assert split_engine_name(engine_name("a.b-c_d", "x/y:1")) == ("a.b-c_d", "x/y:1")
    for text in (f"adapter {OWN!r} and '{OWN}' and sql", f"{OWN}"):
        assert public_text(text) == text.replace(repr(OWN), "'own'").replace(OWN, "own")
        assert label_text(text) == text.replace(repr(OWN), "'acme/own'").replace(OWN, "acme/own")
    mix = mix_of([(LoRARequest(OWN, path="/a"), 0.5), (LoRARequest("sql", path="/b"), 1)])
    assert sorted(public_text(mix.name).split("+")) == ["own:0.5", "sql:1.0"]
    assert sorted(label_text(mix.label).split("+")) == ["acme/own", "sql"]
    assert public_text("nothing of that kind") == "nothing of that kind"


@pytest.mark.parametrize("tenant", ["acme", "globex", "a", "0.-_"])
def test_no_name_of_a_user_is_an_engines_name(tenant):
    """Names over HTTP are printable; the mark is not. And no two pairs of tenant and name make one engine's name."""
    name = engine_name(tenant, "x")
    assert not name.isprintable()
    assert split_engine_name(engine_name(tenant, f"x{MARK}y")) == (tenant, f"x{MARK}y")


def test_own_adapters_are_tenant_and_name():
    labels = SeriesLabels()
    assert labels(OWN, "acme") == ("acme/own", "acme")
    assert labels("sql", "acme") == ("sql", "acme")
    assert labels("", "") == ("", "default")
    assert labels(f"{OWN}+sql", "acme") == ("acme/own+sql", "acme")


def test_one_tenant_cannot_take_the_labels_of_all(monkeypatch):
    monkeypatch.setattr(series_labels, "MAX_OWN_OF_ONE", 2)
    labels = SeriesLabels()
    got = [labels.adapter(engine_name("acme", str(i))) for i in range(5)]
    assert got == ["acme/0", "acme/1", "acme/other", "acme/other", "acme/other"]
    assert labels.adapter(engine_name("globex", "x")) == "globex/x"
    assert labels.adapter(engine_name("acme", "1")) == "acme/1", "for good"
    assert labels.adapter("shared") == "shared"


def test_all_tenants_together_are_bounded(monkeypatch):
    monkeypatch.setattr(series_labels, "MAX_OWN_ADAPTERS", 3)
    monkeypatch.setattr(series_labels, "MAX_TENANTS", 4)
    labels = SeriesLabels()
    got = {labels.adapter(engine_name(f"t{i}", name)) for i in range(50) for name in "ab"}
    assert got == {"t0/a", "t0/b", "t1/a", "t1/other", "t2/other", "t3/other", "other"}


def test_the_engines_numbers_have_the_same_labels():
    metrics = Metrics()
    metrics.update(
        EngineStats(
            speculation=[SpeculationEntry(OWN, "acme", SpeculationCounts(2, 8, 6, [2, 2, 1, 1]))],
            adapters=[AdapterInfo(OWN, "/p", "d", 8, 8, "device", num_running=1)],
            running_adapters=[OWN, "sql"],
            waiting_adapters=[engine_name("globex", "x")],
        )
    )
    recorded = Recorded(metrics, OWN, "acme")
    output = CompletionOutput(0, "x", [1], finish_reason="stop")
    recorded.on_output(RequestOutput("r", None, [1, 2], [output], True, RequestMetrics(queue_seconds=0.03)))
    found = samples(metrics)
    both = (("adapter", "acme/own"), ("tenant", "acme"))
    assert found["spec_decode_num_accepted_tokens_total", both] == 6
    assert found["prompt_tokens_total", both] == 2
    assert found["request_queue_time_seconds_sum", both] >= 0.03
    assert found["lora_requests", (("adapter", "acme/own"), ("state", "running"))] == 1
    info = (("max_lora", "0"), ("running_lora_adapters", "acme/own,sql"), ("waiting_lora_adapters", "globex/x"))
    assert ("lora_requests_info", info) in found
    assert MARK not in metrics.render().decode()


def test_a_stream_finds_its_series_once(monkeypatch):
    """To find them by their labels takes as long as to count."""
    metrics, found = Metrics(), []
    for series in (metrics.generation_tokens, metrics.inter_token_latency):
        labels = series.labels
        monkeypatch.setattr(series, "labels", lambda *names, labels=labels: found.append(names) or labels(*names))
    recorded = Recorded(metrics, "sql", "acme")
    for index in range(5):
        output = CompletionOutput(0, "x", [index], finish_reason="stop" if index == 4 else None)
        recorded.on_output(RequestOutput("r", None, [1, 2], [output], index == 4, RequestMetrics()))
    assert found == [("sql", "acme")] * 2
    both = (("adapter", "sql"), ("tenant", "acme"))
    assert samples(metrics)["generation_tokens_total", both] == 5
    assert samples(metrics)["inter_token_latency_seconds_count", both] == 4


class Ledger:
    status = LedgerStatus(
        num_pending=3, lag_seconds=1.5, database_is_away=True, journal_bytes=100, journal_max_bytes=1000,
        problem="full", num_committed=40, num_commits=7,
    )  # fmt: skip


TENANCY = SimpleNamespace(
    ledger=Ledger(), limiter=SimpleNamespace(num_waiting=2, queue=QueueBound()), directory=SimpleNamespace(tenants={})
)


def test_the_ledger_and_the_limiter():
    metrics = Metrics()
    metrics.register(lambda: tenancy_families(TENANCY))
    found = {
        name: value for (name, labels), value in samples(metrics).items() if name.startswith(("ledger", "limiter"))
    }
    assert found == {
        "ledger_pending_rows": 3, "ledger_lag_seconds": 1.5, "ledger_database_up": 0, "ledger_accepting": 0,
        "ledger_journal_bytes": 100, "ledger_journal_max_bytes": 1000, "ledger_rows_total": 40,
        "ledger_commits_total": 7, "limiter_waiting": 2,
    }  # fmt: skip


PEOPLE = {"admin": Principal(), "user": Principal(tenant="acme", scopes=frozenset({"inference"}))}


@pytest.mark.parametrize(
    ("options", "key", "status"),
    [({}, "admin", 200), ({}, "user", 403), ({}, "", 401), ({"open_metrics": True}, "", 200)],
)
def test_metrics_of_tenants_are_for_admins(http, llm, options, key, status):
    people = SimpleNamespace(authenticate=PEOPLE.get)
    config = ServerConfig(served_model_names=("base",), **options)
    http.app = create_app(llm, config, authenticator=people, tenancy=TENANCY)
    assert http.get("/metrics", headers={"Authorization": f"Bearer {key}"}).status_code == status
    assert http.get("/version").status_code == 200


def test_restarts_are_counted(http, llm):
    llm.num_restarts = 2
    assert "outrider:engine_restarts_total 2.0" in http.get("/metrics").text


def test_metrics_of_drafts_that_learn():
    """By adapter and tenant; pairs of one tenant with several salts are one."""
    metrics = Metrics()
    stats = EngineStats(
        learning=[
            LearningEntry("sql", "acme", "ab", 3, 1, 0.5, 0.25, 100, failed=False),
            LearningEntry("sql", "acme", "cd", 2, 0, 0.7, None, 30, failed=True),
            LearningEntry("", "", "", 0, 0, 0.0, None, 8, failed=False),
        ]
    )
    metrics.update(stats)
    found = samples(metrics)
    acme, base = (("adapter", "sql"), ("tenant", "acme")), (("adapter", ""), ("tenant", "default"))
    values = {key[0].removeprefix("learning_"): found.get(key) for key in found if acme == key[1]}
    assert values == {
        "versions": 5, "versions_dropped": 1, "buffer_bytes": 130, "failed": 1, "acceptance": pytest.approx(0.6),
        "acceptance_before": 0.25,
    }  # fmt: skip
    assert found[("learning_buffer_bytes", base)] == 8
    assert ("learning_acceptance_before", base) not in found
