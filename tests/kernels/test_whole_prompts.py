"""Whole prompts by torch's fused attention: the same results as the kernels', and the cases that stay with those."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.kernels.paged_attention import CACHE_FLOAT8, AttentionOptions, Chunks, LayerKV, Shape, WholeRow, Window
from outrider.kernels.paged_attention import device_step as steps
from outrider.kernels.paged_attention.device_step import DeviceStep
from outrider.kernels.paged_attention.prompt_trial import MARGIN, min_fused_tokens, shortest_win, wins
from outrider.kernels.paged_attention.schedule import Capacity, Planner
from outrider.kernels.paged_attention.whole_prompts import can_serve, find_whole_prompts
from outrider.kernels.rope import Rotation
from outrider.models.layers.norm import RMSNorm

from .test_triton_attention import GPU, LLAMA, Inputs, close, dense, make_inputs, make_projection

ROWS = [(63, 1), (0, 21), (0, 21), (9, 3), (0, 30)]
"""Decodes and a verification between whole prompts, two of which have one length."""
KINDS: list[tuple[list[tuple[int, int]], Window, bool]] = [
    (ROWS, None, True),
    (ROWS, 30, True),
    (ROWS, Chunks(30), True),
    (ROWS, 29, False),
    (ROWS, WholeRow(), False),
    ([*ROWS, (16, 25)], None, False),
]
"""(rows, window, whether torch attends to the prompts)."""


class Launches:
    """Counts launches of attention, and calls of torch's, by their first token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tiles: list[int] = []
        self.calls: Counter[tuple[int, ...]] = Counter()
        tiles, kernel, attend = self.tiles, steps.attention_kernel, torch.nn.functional.scaled_dot_product_attention

        class Counted:
            def __getitem__(self, grid: tuple[int, int]) -> object:
                tiles.append(grid[0])
                return kernel[grid]

        def counted(q: Tensor, *args: Tensor, **kwargs: object) -> Tensor:
            self.calls[tuple(q.shape)] += 1
            return attend(q, *args, **kwargs)

        monkeypatch.setattr(steps, "attention_kernel", Counted())
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def make_step(
    inputs: Inputs, shape: Shape = LLAMA, *, fuses: bool, first_key: int = 0, **options: object
) -> DeviceStep:
    least = 1 if fuses else None
    planner = replace(Planner(shape, inputs.q.dtype.itemsize, GPU, 1), min_fused_tokens=least, **options)
    return DeviceStep(planner, inputs.q.dtype, inputs.block_size, inputs.rows, inputs.q.device, first_key)


def attend(
    inputs: Inputs, shape: Shape, *, fuses: bool, window: Window = None, sinks: Tensor | None = None, norm: bool = False
) -> tuple[Tensor, LayerKV]:
    """Attention of a rotated projection, and the cache after it."""
    torch.manual_seed(0)
    qkv, rotation = make_projection(len(inputs.positions), shape, inputs.q.dtype)
    device = inputs.q.device
    weight = None
    if norm:
        layer = RMSNorm(["q", "k"], shape.head_dim, 1e-6, repeats=[*shape[:2]], dtype=inputs.q.dtype, device=device)
        for index, slot in enumerate(layer.weight_slots().values()):
            slot.load(torch.rand(shape.head_dim, generator=torch.Generator().manual_seed(index)) + 0.5)
        weight = layer.weight
    kv = LayerKV(*(cache.clone() for cache in inputs.kv))
    angles = Rotation(rotation.cos.to(device), rotation.sin.to(device))
    step = make_step(inputs, shape, fuses=fuses)
    return step.attend_qkv(qkv.clone().to(device), angles, weight, kv, window, sinks), kv


@pytest.mark.parametrize(("rows", "window", "fused"), KINDS)
@pytest.mark.parametrize("norm", [False, True])
def test_both_paths_agree(
    device: str, launches: Launches, rows: list[tuple[int, int]], window: Window, fused: bool, norm: bool
) -> None:
    inputs = make_inputs(rows, LLAMA, torch.float32, device)
    ours, cache = attend(inputs, LLAMA, fuses=False, window=window, norm=norm)
    assert not launches.calls
    assert len(launches.tiles) == 2  # of the short rows, and of the long ones
    launches.tiles.clear()
    theirs, other = attend(inputs, LLAMA, fuses=True, window=window, norm=norm)
    assert launches.calls == (Counter({(2, 8, 21, 32): 1, (1, 8, 30, 32): 1}) if fused else Counter())
    assert len(launches.tiles) == (1 if fused else 2)
    close(theirs, ours)
    for one, two in zip(cache, other, strict=True):
        assert torch.equal(one, two)


def test_prompts_are_attended_to_as_defined(device: str, launches: Launches) -> None:
    """Queries that are not rotated, against float64; keys before the first one do not exist."""
    inputs = make_inputs([(3, 40), (40, 1), (3, 35)], Shape(6, 6, 16), torch.float32, device)
    step = make_step(inputs, Shape(6, 6, 16), fuses=True, first_key=3)
    qkv = torch.cat((inputs.q, inputs.k, inputs.v), 1).flatten(1)
    ones = torch.ones(len(qkv), 1, 16, device=device)
    got = step.attend_qkv(qkv, Rotation(ones, torch.zeros_like(ones)), None, inputs.kv, None)
    close(got, dense(inputs, first_key=3))
    assert sum(launches.calls.values()) == 2


def test_non_finite_keys_are_hidden_as_in_the_cache(device: str) -> None:
    inputs = make_inputs([(0, 40)], LLAMA, torch.float32, device)
    results = []
    for fuses in (False, True):
        qkv = torch.cat((inputs.q, inputs.k, inputs.v), 1).flatten(1).clone()
        qkv[30, 8 * 32 :] = math.nan
        qkv[31, 10 * 32 :] = math.inf
        ones = torch.ones(len(qkv), 1, 32, device=device)
        rotation = Rotation(ones, torch.zeros_like(ones))
        results.append(make_step(inputs, fuses=fuses).attend_qkv(qkv, rotation, None, inputs.kv, None))
    assert results[1].isfinite().all()
    close(results[1], results[0])


def test_sinks_and_compressed_caches_stay_with_the_kernels(device: str, launches: Launches) -> None:
    inputs = make_inputs([(0, 30)], LLAMA, torch.float32, device)
    attend(inputs, LLAMA, fuses=True, sinks=torch.zeros(8, device=device))
    attend(inputs._replace(kv=LayerKV(*(x.to(CACHE_FLOAT8) for x in inputs.kv))), LLAMA, fuses=True)
    assert not launches.calls
    attend(inputs, LLAMA, fuses=True)
    assert launches.calls


def test_reserved_steps_stay_with_the_kernels(device: str, launches: Launches) -> None:
    """A captured graph serves rows with cached keys too."""
    inputs = make_inputs([(0, 30)], LLAMA, torch.float32, device)
    planner = Planner(LLAMA, 4, GPU, 1, min_fused_tokens=1)
    step = DeviceStep(planner, torch.float32, 16, Capacity(1, 1, 30, 2, has_long=True), torch.device(device))
    step.refill(inputs.rows)
    qkv = torch.cat((inputs.q, inputs.k, inputs.v), 1).flatten(1)
    ones = torch.ones(len(qkv), 1, 32, device=device)
    close(step.attend_qkv(qkv, Rotation(ones, torch.zeros_like(ones)), None, inputs.kv, None), dense(inputs))
    assert not launches.calls


def test_calls_are_runs_of_rows_of_one_length() -> None:
    rows = make_inputs([(0, 20), (5, 1), (0, 20), (0, 20), (0, 25), (0, 20)], Shape(1, 1, 2), torch.float32, "cpu").rows
    found = find_whole_prompts(rows, 16, 0, 20)
    assert found is not None
    assert found.calls == [(0, 1, 20), (21, 2, 20), (61, 1, 25), (86, 1, 20)]
    assert found.longest == 25
    assert find_whole_prompts(rows, 16, 0, 21) is None, "four prompts are shorter"
    assert find_whole_prompts(rows, 30, 0, 1) is None


def test_models_that_torch_cannot_serve() -> None:
    assert can_serve(AttentionOptions(scale=0.5), torch.bfloat16)
    assert not can_serve(AttentionOptions(soft_cap=50.0), torch.bfloat16)
    assert not can_serve(AttentionOptions(shared=True), torch.bfloat16)
    assert not can_serve(AttentionOptions(), torch.float32)


@pytest.mark.parametrize(("ratio", "expected"), [(MARGIN - 0.01, True), (MARGIN + 0.01, False)])
def test_the_faster_one_is_chosen(device: str, launches: Launches, ratio: float, expected: bool) -> None:
    """Both run, and torch must be faster by more than times vary."""
    runs = []

    def count_seconds(work: Callable[[], object]) -> float:
        work()
        runs.append(sum(launches.calls.values()))
        return ratio if len(runs) == 2 else 1.0

    planner = Planner(LLAMA, 4, GPU, 1)
    assert wins(planner, torch.float32, torch.device(device), count_seconds, tokens=40) == expected
    assert runs == [0, 1]


@pytest.mark.parametrize(("won", "expected"), [(0, None), (1, 60), (2, 40), (3, 20)])
def test_torch_serves_the_lengths_at_which_it_wins(device: str, won: int, expected: int | None) -> None:
    """The kernels have the shorter ones, and what is not tried any more."""
    runs = []

    def seconds_of(work: Callable[[], object]) -> float:
        runs.append(work)
        return 0.5 if len(runs) % 2 == 0 and len(runs) <= 2 * won else 1.0

    planner = Planner(LLAMA, 4, GPU, 1)
    found = shortest_win(planner, torch.float32, torch.device(device), seconds_of, lengths=(60, 40, 20))
    assert found == expected
    assert len(runs) == 2 * min(won + 1, 3)


def test_nothing_is_tried_without_need() -> None:
    cpu = torch.device("cpu")
    assert min_fused_tokens(Planner(LLAMA, 2, GPU), torch.bfloat16, cpu) is None
    cuda = torch.device("cuda")  # these are decided without a look at the device
    assert min_fused_tokens(Planner(LLAMA, 2, GPU, invariant=True), torch.bfloat16, cuda) is None
    assert min_fused_tokens(Planner(LLAMA, 4, GPU), torch.float32, cuda) is None
