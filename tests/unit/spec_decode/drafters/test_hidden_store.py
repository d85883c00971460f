"""HiddenStore: deferred steps are written together, before any read."""

from __future__ import annotations

import pytest
import torch

from outrider.models.batch import LayerKV
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.base import DraftRow
from outrider.spec_decode.drafters.eagle.hidden_store import HiddenStore

WIDTH, BLOCK, NUM_BLOCKS = 4, 4, 12
TABLES = ([3, 1, 7], [2, 5, 4])
REQUEST = Request("r", [0] * 4, 4, SamplingParams(), seed_key=1)


class Fused:
    """A store whose fusing is counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.adapters: list[list[object]] = []
        self.store = HiddenStore(WIDTH, self._fuse, torch.device("cpu"), adapts=True)
        halves = (torch.zeros(NUM_BLOCKS, 1, BLOCK, WIDTH // 2) for _ in range(2))
        self.store.bind_layer(LayerKV(*halves), lambda rows: [name for name, count in rows for _ in range(count)])

    def _fuse(self, states, adapters):
        self.sizes.append(len(states[0]))
        if adapters:
            self.adapters.append(adapters)
        return states[0]


def rows_at(start: int, count: int = 1, tables=TABLES, request: Request = REQUEST) -> list[DraftRow]:
    """Rows that compute `count` tokens from `start` on."""
    return [
        DraftRow(request, [], start + count, 0, 0, table, True, start=start, first_index=index * count)
        for index, table in enumerate(tables)
    ]


def vectors(*values: float) -> tuple[torch.Tensor]:
    return (torch.tensor(values)[:, None].expand(-1, WIDTH).contiguous(),)


def read(store: HiddenStore, count: int) -> list[list[float]]:
    found = store.read(TABLES, [0, 0], [count, count])
    assert bool((found == found[:, :1]).all())
    return found[:, 0].view(2, count).tolist()


def test_steps_without_drafts_are_fused_together_when_they_are_read():
    fused = Fused()
    for step in range(6):  # beyond a block's edge
        fused.store.defer(rows_at(step), vectors(step + 1.0, step + 101.0), None)
    assert fused.sizes == []
    assert read(fused.store, 6) == [[1, 2, 3, 4, 5, 6], [101, 102, 103, 104, 105, 106]]
    assert fused.sizes == [12]
    read(fused.store, 6)
    assert fused.sizes == [12]


@pytest.mark.parametrize("verb", ["write", "defer"])
def test_the_later_one_of_two_writes_of_a_position_stays(verb):
    """A rejected draft, or a block that another request has taken meanwhile."""
    fused = Fused()
    fused.store.defer(rows_at(0, 2), vectors(1.0, 8.0, 101.0, 8.0), None)
    getattr(fused.store, verb)(rows_at(1), vectors(2.0, 102.0), None)
    assert read(fused.store, 2) == [[1, 2], [101, 102]]


def test_a_flush_writes_and_few_tokens_are_put_off():
    fused = Fused()
    fused.store.defer(rows_at(0), vectors(float("nan"), 2.0), None)
    fused.store.flush()
    fused.store.flush()
    assert fused.sizes == [2]
    assert read(fused.store, 1) == [[0], [2]]
    tables = [[block] for block in range(NUM_BLOCKS)]
    for step in range(40):
        fused.store.defer(rows_at(step % BLOCK, tables=tables), vectors(*[1.0] * NUM_BLOCKS), None)
        assert max(fused.sizes) <= 128
    assert sum(fused.sizes) > 400


def test_deferred_steps_are_fused_with_the_adapter_of_each_row():
    fused = Fused()
    adapted = Request("a", [0] * 4, 4, SamplingParams(), seed_key=1)
    adapted.adapter = "drafts"
    fused.store.defer(rows_at(0), vectors(1.0, 2.0), None)
    fused.store.defer(rows_at(1, request=adapted), vectors(3.0, 4.0), None)
    assert fused.sizes == []
    assert read(fused.store, 2) == [[1, 3], [2, 4]]
    assert fused.adapters == [[None, None, "drafts", "drafts"]]


def test_a_step_with_an_unknown_start_is_not_deferred():
    fused = Fused()
    fused.store.defer(rows_at(0), vectors(1.0, 2.0), None)
    fused.store.defer(rows_at(2), vectors(1.0, 2.0), torch.tensor([1, 0]))
    assert fused.sizes == [2, 2]
    found = fused.store.read(TABLES, [1, 2], [1, 1])
    assert found[:, 0].tolist() == [1, 2]


def test_deferred_states_outlive_the_buffers_of_their_step():
    """Buffers of a captured pass are written again by the next one."""
    fused, (buffer,) = Fused(), vectors(1.0, 101.0)
    fused.store.defer(rows_at(0), (buffer,), None)
    buffer.fill_(9.0)
    fused.store.defer(rows_at(1), (buffer,), None)
    assert read(fused.store, 2) == [[1, 9], [101, 9]]
