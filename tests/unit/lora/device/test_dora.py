"""Gains of adapters with trained magnitudes: their owners, and their effect on a step's tokens."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.lora.device.dora import compute_gains, divided_weight
from outrider.lora.device.pool import Allocation
from outrider.lora.device.vectors import VectorSites
from outrider.models.layers.linear import Linear

CPU = torch.device("cpu")
SITES = {"qkv": [("q", 4), ("k", 2), ("v", 2)], "down": [("down", 6)]}
SIZES = {name: size for slices in SITES.values() for name, size in slices}


class Step(NamedTuple):
    runs: tuple


def step(*rows):
    """From (owner or None, number of tokens)."""
    runs, position = [], 0
    for owner, count in rows:
        if owner is not None:
            runs.append((owner, position, position + count))
        position += count
    return Step(tuple(runs))


def make_sites(dtype=torch.float32):
    sites = VectorSites(dtype, CPU)
    return sites, {name: sites.add(slices) for name, slices in SITES.items()}


def scaled(site, y, adapters, **beside):
    result = y.clone()
    site.scale(result, adapters, **beside)
    return result


modules = st.dictionaries(st.sampled_from(sorted(SIZES)), st.integers(-3, 3), max_size=4)


@settings(max_examples=60, database=None)
@given(writes=st.lists(st.tuples(st.sets(st.integers(0, 7), min_size=1, max_size=3), modules), max_size=12))
def test_each_adapter_has_its_own_gains_and_biases_for_as_long_as_it_has_its_rows(writes):
    sites, at = make_sites()
    owners: dict[Allocation, dict[str, int]] = {}
    for rows, values in writes:
        owners = {owner: found for owner, found in owners.items() if not rows.intersection(owner.rows)}
        allocation = Allocation(b"x", tuple(sorted(rows)))
        owners[allocation] = values
        vectors = {name: torch.full((SIZES[name],), float(value)) for name, value in values.items()}
        sites.write(allocation, vectors, {name: vector for name, vector in vectors.items() if name in "kv"})
        adapters = step((None, 1), *((owner, 1) for owner in owners), (None, 1))
        for name, slices in SITES.items():
            y = torch.full((len(owners) + 2, sum(size for _, size in slices)), 2.0)
            expected = y.clone()
            for token, found in enumerate(owners.values(), 1):
                expected[token] *= torch.cat([torch.full((size,), float(found.get(n, 1))) for n, size in slices])
                expected[token] += torch.cat(
                    [torch.full((size,), found.get(n, 0.0) * (n in "kv")) for n, size in slices]
                )
            assert torch.equal(scaled(at[name], y, adapters), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (3, 40, 2, 17), (100, 1, 100, 1)])
def test_only_the_product_is_scaled_and_only_of_whom_it_concerns(dtype, lengths):
    sites, at = make_sites(dtype)
    a, b = Allocation(b"a", (0, 1)), Allocation(b"b", (5,))
    gains = {name: torch.rand(size) + 0.5 for name, size in SIZES.items()}
    sites.write(a, gains, {})
    sites.write(b, {}, {})
    owners = (a, None, b, a)
    adapters = step(*zip(owners, lengths, strict=True))
    total = sum(lengths)
    base, residual = torch.randn(total, 8), torch.randn(total, 8).to(dtype)
    bias = torch.randn(8).to(dtype)
    y = (base + bias + residual).to(dtype)
    got = scaled(at["qkv"], y, adapters, bias=bias, residual=residual)
    gain = torch.cat([gains[name] for name in "qkv"])
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for owner, part, before, product, rest in zip(
        owners, *(t.split(lengths) for t in (got, y, base, residual)), strict=True
    ):
        if owner is a:
            torch.testing.assert_close(part.float(), product * gain + bias + rest, **near)
        else:
            assert torch.equal(part, before)


def test_steps_that_alternate():
    """Two passes of a step, each with its own tokens, and an adapter that comes between them."""
    sites, at = make_sites()
    a, b = Allocation(b"a", (0,)), Allocation(b"b", (1,))
    sites.write(a, {"down": torch.full((6,), 3.0)}, {})
    first, second = step((a, 2), (b, 1)), step((b, 1), (a, 1))
    y = torch.ones(3, 6)
    assert scaled(at["down"], y, first)[:, 0].tolist() == [3, 3, 1]
    sites.write(b, {"down": torch.full((6,), 5.0)}, {})
    assert scaled(at["down"], y[:2], second)[:, 0].tolist() == [5, 3]
    assert scaled(at["down"], y, first)[:, 0].tolist() == [3, 3, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_linear_has_the_row_norms_that_gains_need(dtype, batch_invariant):
    torch.manual_seed(0)
    linear = Linear("x", [("q", 24), ("k", 8)], 16, bias=True, dtype=dtype, device=CPU, batch_invariant=batch_invariant)
    weights = {}
    for name, slot in linear.weight_slots().items():
        weights[name] = torch.randn(slot.shape) * (100 if name.endswith("bias") else 1)
        slot.load(weights[name])
    weight = torch.cat([weights["q.weight"], weights["k.weight"]]).to(dtype).float()
    torch.testing.assert_close(linear.row_squares, weight.square().sum(1))
    x = torch.randn(5, 16).to(dtype)
    near = {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.01, "rtol": 0.01}
    torch.testing.assert_close(linear.project(x).float(), x.float() @ weight.T, **near)
    assert linear.bias is not None
    assert torch.equal(linear.bias, torch.cat([weights["q.bias"], weights["k.bias"]]).to(dtype))


def test_a_weight_of_several_ranks_is_read_once_for_an_adapter():
    weight, reads = torch.randn(6, 5), []
    base = divided_weight(lambda: reads.append(1) or weight)
    a, b, magnitude = torch.randn(3, 5), torch.randn(3, 6), torch.rand(6) + 1
    gains = compute_gains(magnitude, a, b, base)
    torch.testing.assert_close(gains, magnitude / torch.linalg.vector_norm(weight + b.t() @ a, dim=1))
    assert len(reads) == 1


def test_two_threads_write_adapters():
    """The engine's thread writes small adapters, a loader thread large ones: none overwrites another."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(30):
            sites = VectorSites(torch.float32, CPU)
            site = [sites.add([(f"m{index}", 2048)]) for index in range(20)][-1]
            owners = [Allocation(bytes([row]), (row,)) for row in range(6)]

            def write(owner, sites=sites):
                gains = {f"m{index}": torch.full((2048,), owner.rows[0] + 2.0) for index in range(20)}
                sites.write(owner, gains, {})

            with ThreadPoolExecutor(2) as pool:
                list(pool.map(write, owners))
            y = torch.ones(6, 2048)
            wanted = torch.arange(2.0, 8.0).unsqueeze(1).expand(6, 2048)
            assert scaled(site, y, step(*((owner, 1) for owner in owners))).equal(wanted)
    finally:
        sys.setswitchinterval(interval)
