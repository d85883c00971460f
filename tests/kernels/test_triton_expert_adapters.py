"""Adapters on experts as a GPU computes them: outputs are those of experts with merged weights."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from outrider.kernels import act_and_mul, experts
from outrider.kernels.experts import Routing
from outrider.lora.device import sites
from outrider.lora.device.batching import LoraBatcher
from outrider.lora.device.layout import LoraWeights
from outrider.lora.device.pool import RowPool
from outrider.lora.device.sites import AdapterSites
from outrider.models.layers.linear import Linear

EXPERTS, HIDDEN, INNER, TOP = 5, 20, 12, 2
NAMES = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}


def module(expert: int, name: str) -> str:
    return f"model.layers.0.mlp.experts.{expert}.{name}"


def make_linears(device: torch.device) -> list[Linear]:
    common = {"expert": True, "dtype": torch.float32, "device": device}
    first = [
        Linear(
            f"layers.0.experts.{e}.gate_up", [(module(e, n), INNER) for n in ("gate_proj", "up_proj")], HIDDEN, **common
        )
        for e in range(EXPERTS)
    ]
    last = [
        Linear(f"layers.0.experts.{e}.down", [(module(e, "down_proj"), HIDDEN)], INNER, **common)
        for e in range(EXPERTS)
    ]
    return first + last


def draw(rank: int, names: list[str], numbers: range) -> dict[str, LoraWeights]:
    return {
        module(expert, name): LoraWeights(
            torch.randn(rank, NAMES[name][0]) * 0.3, torch.randn(rank, NAMES[name][1]) * 0.3
        )
        for expert in numbers
        for name in names
    }


ADAPTERS = {
    b"all": (3, [*NAMES], range(EXPERTS)),
    b"down": (2, ["down_proj"], range(EXPERTS)),
    b"some": (5, [*NAMES], range(1, 3)),
}


@pytest.mark.parametrize(
    "mix",
    [
        [(b"all", 1)],
        [(None, 3), (b"down", 2), (b"all", 9), (b"some", 4), (b"all", 1), (None, 1), (b"none", 2)],
        [(b"some", 70), (b"all", 20)],
    ],
)
def test_deltas_of_a_mixed_batch(mix, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from outrider.kernels.experts.triton import TritonExperts

    monkeypatch.setattr(sites, "is_grouped", lambda dtype, device: True)
    monkeypatch.setattr(sites, "_serves", lambda linears: True)  # they have no weights here
    torch.manual_seed(0)
    on = torch.device(device)
    linears = make_linears(on)
    placed = AdapterSites(linears, None, torch.float32, on)
    pool = RowPool(16, 8)
    placed.allocate(16)
    weights = {key: draw(*form) for key, form in ADAPTERS.items()} | {b"none": {}}
    for key, modules in weights.items():
        placed.write(pool.allocate(key, ADAPTERS.get(key, (1,))[0]), placed.model.layout.pack(modules))
    base = {
        module(e, n): torch.randn(out, inputs) * inputs**-0.5
        for e in range(EXPERTS)
        for n, (inputs, out) in NAMES.items()
    }
    gate_up = [torch.cat([base[module(e, n)] for n in ("gate_proj", "up_proj")]).to(on) for e in range(EXPERTS)]
    packed = TritonExperts(gate_up, [base[module(e, "down_proj")].to(on) for e in range(EXPERTS)])
    num_tokens = sum(count for _, count in mix)
    x = torch.randn(num_tokens, HIDDEN)
    routing = experts.route(torch.randn(num_tokens, EXPERTS), TOP, renormalised=True, rounded=False)
    rows = [(pool.allocation(key) if key else None, count) for key, count in mix]
    batch = LoraBatcher(torch.float32, on).build(rows, targets_experts=True)
    add = tuple(partial(linears[place].expert_lora.add, adapters=batch) for place in (0, EXPERTS))
    y = packed(x.to(on), Routing(*(part.to(on) for part in routing)), None, add).cpu()
    owners = [key for key, count in mix for _ in range(count)]
    expected = torch.stack(
        [
            define(x[t], SimpleNamespace(e=routing.experts[t], w=routing.weights[t]), base, weights.get(owners[t], {}))
            for t in range(num_tokens)
        ]
    )
    torch.testing.assert_close(y, expected, atol=2e-4, rtol=2e-4)
    pool.evict(b"all")
    del rows, batch, add
    assert b"all" not in {allocation.key for allocation in linears[0].expert_lora._rows}


def test_memory_follows_the_experts_that_an_adapter_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no more than what counts in `lora_memory`."""
    pytest.importorskip("triton")
    monkeypatch.setattr(sites, "is_grouped", lambda dtype, device: True)
    monkeypatch.setattr(sites, "_serves", lambda linears: True)
    linears = make_linears(torch.device("cpu"))
    placed = AdapterSites(linears, None, torch.float32, torch.device("cpu"))
    placed.allocate(16)
    pool = RowPool(16, 8)
    for key, numbers in ((b"one", range(2, 3)), (b"four", range(4))):
        packed = placed.model.layout.pack(draw(4, [*NAMES], numbers))
        allocation = pool.allocate(key, 4)
        placed.write(allocation, packed)
        taken = sum(linears[place].expert_lora.num_bytes(allocation) for place in (0, EXPERTS))
        assert taken == len(numbers) * 3 * 4 * (HIDDEN + INNER) * 4  # modules of rank 4 in float32
        assert taken <= packed.bytes_outside_rows


def define(x, routed, base, adapter):
    """One token's output, with merged weights."""

    def merged(expert: int, name: str) -> torch.Tensor:
        key = module(expert, name)
        return base[key] + adapter[key].b.t() @ adapter[key].a if key in adapter else base[key]

    y = torch.zeros(HIDDEN)
    for expert, weight in zip(routed.e.tolist(), routed.w, strict=True):
        outer = torch.cat([merged(expert, name) @ x for name in ("gate_proj", "up_proj")])
        y += weight * (merged(expert, "down_proj") @ act_and_mul.torch.act_and_mul(outer[None], "silu")[0])
    return y
