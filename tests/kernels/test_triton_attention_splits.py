"""Keys of a tile that several programs share, short contexts that one program attends to, and rows whose queries see
each other."""

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.paged_attention import Chunks, Shape, WholeRow, Window, device_step
from outrider.kernels.paged_attention import triton as kernels

from .attention_backends import unrotated
from .test_triton_attention import LLAMA, MIXED, attend, check, close, dense, make_inputs, make_step


@pytest.fixture
def split_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are split from 256 on."""
    monkeypatch.setattr(kernels, "WHOLE_KEYS", 0)


@pytest.mark.parametrize(("num_splits", "window"), [(2, None), (4, 300), (16, None), (4, Chunks(600)), (4, WholeRow())])
def test_split_keys(device: str, num_splits: int, window: Window, split_early: None) -> None:
    rows = [(1030, 1), (0, 1), (255, 2), (600, 5), (300, 70)]
    check(rows, Shape(2, 1, 16), device, num_splits=num_splits, window=window)


@pytest.mark.parametrize(("fold", "queries"), [(4, 7), (8, 16), (5, 33), (1, 140)])
def test_queries_of_a_block_see_each_other(device: str, fold: int, queries: int) -> None:
    """In one tile a row, whose program writes the keys too, and in several."""
    rows = [(100, queries), (0, queries), (63, max(1, queries - 3)), (9, 1)]
    check(rows, Shape(fold, 1, 16), device, dtype=torch.float16, window=WholeRow())


@pytest.mark.parametrize("queries", [1, 9])
def test_new_keys_in_several_splits(device: str, queries: int, split_early: None) -> None:
    """A program writes the new keys of its own chunks; the last one to finish adds the parts, and the next layer's
    launches find the counts as they were."""
    shape = Shape(4, 2, 16)
    inputs = make_inputs([(508, queries), (5, 1), (767, queries)], shape, torch.float32, device)
    step = make_step(inputs, shape, 4)
    for q in (inputs.q, -inputs.q):
        layer = inputs._replace(q=q)
        close(attend(step, layer), dense(layer))


@pytest.mark.parametrize(("context", "is_split"), [(1000, False), (1024, False), (1100, True)])
def test_short_contexts_are_not_split(
    device: str, context: int, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many programs a launch has for a tile, up to 1,024 keys one of them attends to all."""
    found = []

    class Spy:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            def launch(*args: object, **constants: object) -> None:
                parts = args[kernels.attention_kernel.arg_names.index("parts")]
                parts.fill_(-77.0)  # type: ignore[attr-defined]
                kernels.attention_kernel[grid](*args, **constants)
                found.append((grid[1], bool((parts != -77.0).any())))  # type: ignore[attr-defined]

            return launch

    monkeypatch.setattr(device_step, "attention_kernel", Spy())
    inputs = make_inputs([(context - 1, 1)], Shape(2, 1, 16), torch.float32, device)
    close(attend(make_step(inputs, Shape(2, 1, 16), 4), inputs), dense(inputs))
    assert found == [(4, is_split)]


@pytest.mark.parametrize(("dtype", "window", "num_splits"), [(torch.float32, None, 4), (torch.float16, 20, 1)])
def test_sinks_count_once(
    device: str, dtype: torch.dtype, window: int | None, num_splits: int, split_early: None
) -> None:
    inputs = make_inputs([*MIXED, (700, 1)], LLAMA, dtype, device)
    sinks = torch.linspace(-3, 6, LLAMA.num_heads)
    got = attend(make_step(inputs, LLAMA, num_splits), inputs, window, sinks.to(device))
    close(got, dense(inputs, window, sinks=sinks))


@pytest.mark.parametrize("rows", [MIXED, [(40, 1), (17, 2)]], ids=["written before", "written by tiles"])
def test_queries_alone_read_the_keys_of_an_earlier_layer(device: str, rows: list[tuple[int, int]]) -> None:
    inputs = make_inputs(rows, LLAMA, torch.float32, device)
    step, window = make_step(inputs, LLAMA), Chunks(24)
    expected = attend(step, inputs, window)
    kept = [cache.clone() for cache in inputs.kv]
    _, rotation = unrotated(inputs.q, inputs.k, inputs.v)
    close(step.attend_qkv(inputs.q.flatten(1), rotation, None, inputs.kv, window), expected)
    assert all(map(torch.equal, inputs.kv, kept))
