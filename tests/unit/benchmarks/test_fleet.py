"""The simulated fleet: no request vanishes, a seed decides everything, and routing by adapter saves loads."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

COSTS = {
    "one_adapter": {"1": 0.010, "8": 0.014},
    "own_adapters": {"1": 0.010, "8": 0.018},
    "prompt": {"0": 0.0, "256": 0.128},
    "overhead": 0.002,
    "load": 0.05,
    "load_beside": 0.1,
    "load_steps": 0.02,
    "start": 5.0,
}


@pytest.fixture
def fleet(repo_root, monkeypatch):
    """Parts of the model, and a run of a small fleet under a load that it bears."""
    monkeypatch.syspath_prepend(repo_root / "benchmarks")
    from fleet_model import costs, load, simulation

    parts = SimpleNamespace(measured=costs.Costs.read(json.loads(json.dumps(COSTS))))
    small = simulation.Fleet(replicas=6, limits=costs.Limits(slots=8), prefixes=64)

    def run(strategy="affinity", *, seed=0, count=800, adapters=200, rate=25.0, **options):
        requests = load.Load(count, rate, adapters=adapters, tenants=10).requests(seed)
        return simulation.Simulation(parts.measured, replace(small, **options), strategy, seed).run(requests)

    def serve(*requests):
        """Times to first token on one replica, of requests (arrival, adapter, prompt tokens, output tokens),
        in the order of their ends."""
        asked = [
            load.Request(number, at, 0, adapter, number, 0, prompt, output)
            for number, (at, adapter, prompt, output) in enumerate(requests)
        ]
        alone = simulation.Simulation(parts.measured, replace(small, replicas=1), "affinity", seed=0)
        alone.run(asked)
        return alone.ttft

    parts.run, parts.serve = run, serve
    parts.times = costs.StepTimes(parts.measured, costs.Limits())
    return parts


@pytest.mark.parametrize("strategy", ["random", "round robin", "affinity"])
def test_every_request_ends_or_is_counted_lost(fleet, strategy):
    found = fleet.run(strategy, lifetime=20.0)
    assert found["failures"] > 0
    assert found["lost"] > 0
    assert found["retried"] > 0
    assert found["ended"] + found["lost"] == 800
    assert fleet.run(strategy)["ended"] == 800


def test_a_seed_decides_everything(fleet):
    first = fleet.run("random", lifetime=20.0)
    assert fleet.run("random", lifetime=20.0) == first
    assert fleet.run("random", seed=1, lifetime=20.0) != first


def test_affinity_loads_fewer_adapters_and_answers_sooner(fleet):
    affine, in_turn = fleet.run("affinity"), fleet.run("round robin")
    assert affine["adapter_loads"] < 0.7 * in_turn["adapter_loads"]
    assert affine["adapter_hits"] > in_turn["adapter_hits"]
    assert affine["ttft_p50"] < in_turn["ttft_p50"]


def test_a_lone_request_takes_the_measured_time(fleet):
    """One replica, one request: the load, the step with its prompt of 96 to 160 tokens, and the way to the engine."""
    found = fleet.run(count=1, replicas=1)
    assert found["adapter_loads"] == 1
    assert 0.05 + 0.010 + 0.048 + 0.002 <= found["ttft_p50"] <= 0.05 + 0.010 + 0.080 + 0.002


def test_a_load_during_a_running_request(fleet):
    """The first request: 2 ms to the engine, a load of 50, a step of 10 with a prompt of 4. Steps then end at 1.006 s.

    The second comes at 1.002. It is read from 1.006 to 1.106, concurrently with steps of 12 ms; one of them
    ends at 1.114. It is written concurrently with the next step, of 10 ms, and then takes part in one of 14.
    """
    second, first = fleet.serve((0.0, 0, 8, 200), (1.0, 1, 8, 1))
    assert first == pytest.approx(0.066)
    assert second == pytest.approx(0.138)


def test_a_load_yields_to_prompts_of_running_requests(fleet):
    """A prompt of 200 tokens is computed from 1.042 to 1.152 s. The load stands still for 50 ms of it, up to 1.156."""
    third, second, _ = fleet.serve((0.0, 0, 8, 200), (1.0, 1, 8, 1), (1.03, 0, 200, 1))
    assert third == pytest.approx(0.122)
    assert second == pytest.approx(0.188)


def test_a_request_to_a_failing_replica_is_routed_again(fleet):
    fleet.measured = replace(fleet.measured, overhead=1.0, start=100.0)
    found = fleet.run("random", lifetime=40.0)
    assert found["retried"] > 0
    assert found["ttft_quantiles"][-1] < 50.0


def test_adapters_stay_while_they_are_used_or_wanted(fleet):
    """With fewer slots than rows an adapter is loaded once for each time that it is wanted, at most."""
    found = fleet.run("random", count=300, replicas=1, adapters=40, rate=1000.0)
    assert found["ended"] == 300
    assert found["adapter_loads"] <= 300


def test_steps_between_the_measured_ones_lie_on_lines(fleet):
    assert fleet.times(1, 1, 0) == fleet.times(0, 0, 0) == pytest.approx(0.010)
    assert fleet.times(8, 1, 0) == pytest.approx(0.014)
    assert fleet.times(8, 8, 128) == pytest.approx(0.018 + 0.064)
    assert fleet.times(8, 1, 0) < fleet.times(8, 4, 0) < fleet.times(8, 8, 0)


def test_affinity_is_the_rule_of_the_product(fleet):
    """An adapter counts more than a prefix, and a prefix more than a queue."""
    from fleet_model.load import Load
    from fleet_model.routing import Router

    from outrider.platform.replicas.routing import SLACK, ReplicaView, RoutingKey

    views = [ReplicaView(4, 4) for _ in range(4)]
    (request,) = Load(1, 1.0, adapters=1, tenants=1, prefixes=1).requests(0)
    views[1].give(RoutingKey("", ("0/0",)))
    views[1].ongoing = 3
    assert Router("affinity", views, seed=0).send(request) == 1
    del views[1].adapters["0"]
    views[2].adapters.use("0")
    assert Router("affinity", views, seed=0).send(request) == 2
    views[2].ongoing = SLACK + 10
    assert Router("affinity", views, seed=0).send(request) == 1
