"""Mixes and their parts in any order of requests, loads, unloads, preemptions and evictions."""

import contextlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.lora.files.tensor_keys import ModuleShape
from outrider.lora.manager import AdapterManager
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.errors import NotFoundError
from outrider.platform.core.lora_request import LoRARequest

from ..conftest import make_linears, write_adapter
from ..parsing import parse
from .mix_requests import added_by, mixed_request

pytestmark = pytest.mark.slow


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_requests_and_changes(tmp_path_factory, data):
    """A request keeps the sum of its parts' contents when it was added, whatever is loaded, replaced, unloaded,
    preempted and evicted meanwhile."""
    root = tmp_path_factory.getbasetemp() / "any-order"
    paths = [str(root / str(seed)) for seed in range(4)]
    if not root.exists():
        for seed, path in enumerate(paths):
            write_adapter(Path(path), rank=1 + seed % 2, seed=seed)
    linears = make_linears()
    config = LoRAConfig(max_loras=3, max_cpu_loras=data.draw(st.sampled_from([4, 6])), max_lora_rank=4)
    manager = AdapterManager(linears, config, torch.float32, "cpu")
    manager.linears = linears
    single = {path: _deltas(path) for path in paths}
    where = {"a": paths[0], "b": paths[1]}
    live = []
    for _ in range(data.draw(st.integers(5, 25))):
        match data.draw(st.sampled_from(["ask", "ask", "ask", "replace", "unload", "preempt", "end", "wait"])):
            case "ask":
                weights = data.draw(st.tuples(*[st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])] * 2).filter(any))
                request = mixed_request(*zip(where, where.values(), weights, strict=True))
                manager.resolve(request)
                live.append((request, sum(w * single[where[name]] for name, w in zip(where, weights, strict=True))))
            case "replace":
                name = data.draw(st.sampled_from("ab"))
                where[name] = data.draw(st.sampled_from(paths))
                manager.catalog.load(LoRARequest(name, path=where[name]), load_inplace=True)
            case "unload":
                with contextlib.suppress(NotFoundError):
                    manager.catalog.unload(data.draw(st.sampled_from("ab")))
            case "preempt" if live:
                manager.release(data.draw(st.sampled_from(live))[0])
            case "end" if live:
                manager.forget(live.pop(data.draw(st.integers(0, len(live) - 1)))[0])
            case "wait":
                manager.wait(0.05)
        for request, expected in live:
            if manager.admit(request) is None:
                torch.testing.assert_close(added_by(manager, request), expected, atol=1e-4, rtol=1e-4)
        manager.check_integrity()
    while live:  # everyone gets its turn
        done = [item for item in live if manager.admit(item[0]) is None]
        for request, expected in done:
            torch.testing.assert_close(added_by(manager, request), expected, atol=1e-4, rtol=1e-4)
            manager.forget(request)
        live = [item for item in live if item not in done]
        manager.wait(10)
        manager.check_integrity()
    manager.close()


def _deltas(path):
    """Delta of an adapter for ones in the first linear, from its files."""
    known = {name: ModuleShape(x.in_features, size) for x in make_linears() for name, size in x.slices}
    modules = parse(path, known, max_rank=4, dtype=torch.float32).modules
    return torch.cat([modules[name].a.sum(1) @ modules[name].b for name, _ in make_linears()[0].slices])
