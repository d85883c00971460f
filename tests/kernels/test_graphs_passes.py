"""Passes that are replayed give what the same passes give piece by piece, and leave the cache of others alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.graphs import Captured, Work
from outrider.models import attention, decoder
from outrider.models.attention import grouped
from outrider.models.attention.torch import TorchAttention
from outrider.models.attention.triton import TritonAttention
from outrider.models.batch import ForwardBatch, LayerKV, SequenceRows, allocate_kv, build_batch
from outrider.models.config import DecoderConfig
from outrider.models.layers.rope import RotaryEmbedding
from outrider.models.pass_graphs import PassGraphs, PassInputs
from outrider.models.pass_grid import PassLimits
from outrider.models.rope_config import RopeConfig
from outrider.spec_decode.drafters.base import no_adapters

from .call_tape import CallTape, graph_backend, without_native_kernels

BLOCK, NUM_BLOCKS, VOCAB = 16, 40, 61
CONFIG = DecoderConfig(
    **{"architecture": "LlamaForCausalLM", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48},
    **{"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 256},
    **{"rms_norm_eps": 1e-6, "rope": RopeConfig(rope_type="default", theta=1e4), "tie_word_embeddings": True},
    **{"windows": (None, 20), "qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": True},
    dtype=torch.float32,
)


class Passes:
    """A decoder, and its passes with and without graphs, each with a cache of its own, equal at first."""

    def __init__(self, device: str, *, lazily: bool) -> None:
        self.model = decoder.Decoder(CONFIG, device)
        for index, slot in enumerate(self.model.weight_slots().values()):
            generator = torch.Generator().manual_seed(index)
            slot.load(torch.randn(slot.shape, generator=generator) * slot.shape[-1] ** -0.5)
        generator = torch.Generator().manual_seed(7)
        self.kv, self.plain_kv = (
            allocate_kv(self.model.kv_layers, NUM_BLOCKS, BLOCK, torch.float32, device) for _ in range(2)
        )
        for ours, theirs in zip(self.kv, self.plain_kv, strict=True):
            for ours_part, theirs_part in zip(ours, theirs, strict=True):
                theirs_part.copy_(torch.randn(ours_part.shape, generator=generator))
                ours_part.copy_(theirs_part)
        self.graphs = PassGraphs(graph_backend(device, lazily=lazily), PassLimits(6, 200, max_tokens=128, max_drafts=3))
        self.passes = self.graphs.of(self.model, self.kv, self._compute, [no_adapters])

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[torch.Tensor, ...]:
        hidden = self.model.forward(batch).hidden
        return hidden, hidden.index_select(0, inputs.last)

    def rows(self, *rows: tuple[int, int], seed: int = 0) -> SequenceRows:
        """Rows of (first position, number of tokens), in blocks of their own, of random tokens."""
        generator = torch.Generator().manual_seed(seed)
        blocks = iter(torch.randperm(NUM_BLOCKS, generator=generator).tolist())
        return SequenceRows(
            token_ids=torch.randint(VOCAB, (sum(n for _, n in rows),), generator=generator).tolist(),
            query_lens=[n for _, n in rows],
            starts=[start for start, _ in rows],
            block_tables=[[next(blocks) for _ in range(-(-(start + n) // BLOCK))] for start, n in rows],
        )

    @torch.inference_mode()
    def check(self, rows: SequenceRows) -> None:
        """One pass both ways: equal outputs, and equal caches, all blocks of others included."""
        wanted = self.model.forward(build_batch(rows, self.model, self.plain_kv)).hidden
        found = self.passes.run(rows, [(None, n) for n in rows.query_lens])
        assert found is not None
        hidden, last = found
        torch.testing.assert_close(hidden[: len(wanted)], wanted, atol=2e-5, rtol=2e-5)
        ends = torch.tensor(rows.query_lens).cumsum(0) - 1
        torch.testing.assert_close(last[: len(ends)], wanted[ends], atol=2e-5, rtol=2e-5)
        for ours, theirs in zip(self.kv, self.plain_kv, strict=True):
            for ours_part, theirs_part in zip(ours, theirs, strict=True):
                torch.testing.assert_close(ours_part, theirs_part, atol=2e-5, rtol=2e-5)
                untouched = self._untouched(rows)
                assert torch.equal(ours_part[:, untouched], theirs_part[:, untouched])

    def check_recorded(self, count: int) -> None:
        """Check the number of captured passes that were replayed; a GPU does not report it."""
        if isinstance(self.graphs.backend, CallTape):
            assert len(self.graphs.backend.num_calls) == count

    @staticmethod
    def _untouched(rows: SequenceRows) -> list[int]:
        used = {block for table in rows.block_tables for block in table}
        return [block for block in range(NUM_BLOCKS) if block not in used]


@pytest.fixture
def make_passes(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Passes]:
    """Passes that are not captured yet."""
    monkeypatch.setattr(grouped, "make_attention", lambda spec, *, batch_invariant: TritonAttention(spec, num_splits=1))
    without_native_kernels(monkeypatch)
    return functools.partial(Passes, device)


@pytest.fixture
def passes(make_passes: Callable[..., Passes]) -> Passes:
    """Passes of all shapes."""
    made = make_passes(lazily=True)
    made.graphs.capture_ahead()
    return made


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ([(30, 1), (4, 1)], [[(95, 1), (63, 1)], [(0, 1), (16, 1)]]),  # other rows, blocks and lengths
        ([(5, 1)] * 5, [[(70, 1), (1, 1), (15, 1), (40, 1), (31, 1), (0, 1)]]),  # a row of padding, and none
        ([(20, 3), (33, 3)], [[(46, 3), (90, 2)], [(14, 2), (80, 3)]]),  # cut short, in turn
        ([(20, 4), (7, 1), (8, 1), (60, 1)], [[(7, 1), (20, 1), (8, 4), (60, 1)]]),  # ragged
        (
            [(30, 1), (0, 41), (4, 1)],
            [[(10, 50), (3, 1)], [(0, 17), (0, 18), (70, 1), (20, 1)]],
        ),  # prompts with decodes
    ],
)
def test_a_replay_computes_other_rows(
    passes: Passes, first: Sequence[tuple[int, int]], others: Sequence[Sequence[tuple[int, int]]]
) -> None:
    passes.check(passes.rows(*first))
    for seed, rows in enumerate(others, 1):
        passes.check(passes.rows(*rows, seed=seed))
    assert passes.graphs.num_replayed == 1 + len(others)
    passes.check_recorded(1)


def test_prompts_beyond_the_short_context_of_longrope_run_without_a_graph(
    make_passes: Callable[..., Passes], device: str
) -> None:
    """A graph knows a token's position alone, which decides for all others."""
    passes = make_passes(lazily=True)
    half = CONFIG.head_dim // 2
    config = RopeConfig(
        rope_type="longrope",
        theta=1e4,
        original_max_position_embeddings=40,
        short_factor=(1.0,) * half,
        long_factor=tuple(2.0 + i for i in range(half)),
    )
    passes.model.rope = RotaryEmbedding([config], CONFIG.head_dim, dtype=torch.float32, device=torch.device(device))
    passes.graphs.capture_ahead()
    rows = passes.rows((39, 2), (120, 2))
    rows.prompt_lens = (40, 100)
    passes.check(rows)
    rows.prompt_lens = (41, 100)
    assert passes.passes.run(rows, [(None, 2)] * 2) is None


def test_shapes_do_not_disturb_each_other(make_passes: Callable[..., Passes]) -> None:
    """They share inputs, the attention's numbers and memory; the rope's table is not replaced when contexts grow."""
    passes = make_passes(lazily=True)
    passes.model.rope._table = passes.model.rope._compute(4)
    passes.graphs.capture_ahead()
    for seed, rows in enumerate([[(3, 1)], [(9, 2), (50, 1)], [(199, 1)], [(9, 2), (50, 2)], [(100, 1)], [(1, 1)] * 2]):
        passes.check(passes.rows(*rows, seed=seed))
    passes.check_recorded(3)


def test_passes_without_a_graph(passes: Passes) -> None:
    def run(*rows: tuple[int, int]) -> object:
        with torch.inference_mode():
            return passes.passes.run(passes.rows(*rows), [(None, n) for _, n in rows])

    before = [part.clone() for layer in passes.kv for part in layer]
    assert run(*[(0, 1)] * 7) is None  # too many rows
    assert run((0, 120), (0, 9)) is None  # too many tokens
    assert run((0, 16), (0, 16), (0, 16), (0, 16), (0, 16)) is None
    assert run((200, 1)) is None  # too long
    assert passes.graphs.num_single == 4
    for old, new in zip(before, (part for layer in passes.kv for part in layer), strict=True):
        assert torch.equal(old, new)
    assert passes.graphs.num_replayed == 0


def test_all_shapes_are_captured_before_the_first_pass_and_none_later(make_passes: Callable[..., Passes]) -> None:
    """Without rows; what is captured then serves any rows."""
    passes = make_passes(lazily=False)
    graphs = passes.graphs
    graphs.capture_ahead()
    captured = graphs.num_captured
    assert captured == len(graphs.grid.decodes) + len(graphs.grid.prompts)
    for seed, rows in enumerate([[(30, 1)], [(9, 3), (50, 1)], [(7, 4)] * 6, [(20, 1), (0, 33)], [(0, 100), (3, 4)]]):
        passes.check(passes.rows(*rows, seed=seed))
    with torch.inference_mode():
        assert passes.passes.run(passes.rows((0, 129)), [(None, 129)]) is None
    assert (graphs.num_captured, graphs.num_replayed, graphs.num_single) == (captured, 5, 1)


def test_an_uncaptured_shape_uses_a_larger_one(
    make_passes: Callable[..., Passes], caplog: pytest.LogCaptureFixture
) -> None:
    """The largest come first."""
    passes = make_passes(lazily=False)
    graphs, clock = passes.graphs, iter(range(100))
    graphs.capture_ahead(6.0, lambda: float(next(clock)))
    assert graphs.num_captured == 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    passes.check(passes.rows((30, 1), (4, 1)))
    passes.check(passes.rows((9, 30), (4, 1), seed=1))
    assert (graphs.num_captured, graphs.num_replayed, graphs.num_single) == (5, 2, 0)


def test_no_more_graphs_than_there_may_be(make_passes: Callable[..., Passes], caplog: pytest.LogCaptureFixture) -> None:
    passes = make_passes(lazily=True)
    passes.graphs.limits = passes.graphs.limits._replace(max_graphs=2)
    passes.graphs.capture_ahead()
    assert passes.graphs.num_captured == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    passes.check(passes.rows((5, 1)))
    passes.check(passes.rows((5, 4)))
    passes.check_recorded(2)


def test_memory_of_graphs_is_dropped(passes: Passes) -> None:
    passes.check(passes.rows((5, 1)))
    passes.graphs.clear()
    with torch.inference_mode():
        assert passes.passes.run(passes.rows((5, 1)), [(None, 1)]) is None


def test_after_a_failed_capture_no_more_are_tried(
    make_passes: Callable[..., Passes], caplog: pytest.LogCaptureFixture
) -> None:
    """The captured one serves what fits into it."""
    passes = make_passes(lazily=True)
    tape, tried = passes.graphs.backend, []

    class Broken:
        def capture(self, work: Work) -> Captured:
            tried.append(work)
            if len(tried) == 2:
                raise torch.OutOfMemoryError("no memory")
            return tape.capture(work)

    passes.graphs.backend = Broken()
    passes.graphs.capture_ahead()
    assert (passes.graphs.num_captured, len(tried)) == (1, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    passes.check(passes.rows((7, 1)))
    passes.check(passes.rows((9, 3), (50, 1), seed=1))
    with torch.inference_mode():
        assert passes.passes.run(passes.rows((0, 129)), [(None, 129)]) is None


def test_attention_that_cannot_be_captured(device: str) -> None:
    spec = attention.AttentionSpec(2, 1, 8, frozenset({None}), torch.float32, torch.device(device))
    model = decoder.Decoder(CONFIG, device)
    model.attention = TorchAttention(spec)
    kv = [LayerKV(*torch.zeros(2, 1, NUM_BLOCKS, BLOCK, 8))]
    graphs = PassGraphs(graph_backend(device), PassLimits(4, 64))
    assert graphs.of(model, kv, lambda batch, inputs: (), []) is None


@pytest.mark.parametrize(
    ("rows", "over", "unused"),
    [
        ([(33, 4), (17, 4), (50, 4)], [1, 2, 0], [0, 3, 1]),  # across blocks, and not at all
        ([(19, 3), (35, 1), (6, 4), (1, 2)], [3, 3, 0, 1], [2, 0, 3, 0]),
        ([(16, 1), (32, 1)], [1, 0], [0, 0]),
    ],
)
@torch.inference_mode()
def test_rows_that_begin_earlier_than_planned(
    passes: Passes, device: str, rows: list[tuple[int, int]], over: list[int], unused: list[int]
) -> None:
    """The device corrects positions, slots and what is attended to, before a replay and without graphs."""
    planned = passes.rows(*rows)
    planned.overshoot, planned.unused = torch.tensor(over, device=device), torch.tensor(unused, device=device)
    true = planned.settled()
    assert true.starts == [start - by for (start, _), by in zip(rows, over, strict=True)]
    wanted = passes.model.forward(build_batch(true, passes.model, passes.plain_kv)).hidden
    ends = (torch.tensor(true.query_lens).cumsum(0) - 1).to(device) - planned.unused
    assert torch.equal(true.last_tokens(ends.device), ends)
    batch = build_batch(planned, passes.model, passes.kv)
    assert torch.equal(batch.positions, build_batch(true, passes.model, passes.plain_kv).positions)
    torch.testing.assert_close(passes.model.forward(batch).hidden, wanted, atol=2e-5, rtol=2e-5)
    for _ in range(2):
        found = passes.passes.run(planned, [(None, n) for n in planned.query_lens])
        assert found is not None
        torch.testing.assert_close(found[0][: len(wanted)], wanted, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(found[1][: len(ends)], wanted[ends], atol=2e-5, rtol=2e-5)
    for ours, theirs in zip(passes.kv, passes.plain_kv, strict=True):
        for ours_part, theirs_part in zip(ours, theirs, strict=True):
            torch.testing.assert_close(ours_part, theirs_part, atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_rows_of_several_tiles_mix_with_earlier_starts(passes: Passes, device: str) -> None:
    planned = passes.rows((33, 4), (5, 60), (20, 3))
    planned.overshoot = torch.tensor([2, 0, 3], device=device)
    hidden = [
        passes.model.forward(build_batch(rows, passes.model, kv)).hidden
        for rows, kv in ((planned, passes.kv), (planned.settled(), passes.plain_kv))
    ]
    torch.testing.assert_close(hidden[0], hidden[1], atol=2e-5, rtol=2e-5)
    for ours, theirs in zip(passes.kv, passes.plain_kv, strict=True):
        assert all(torch.allclose(*parts, atol=2e-5) for parts in zip(ours, theirs, strict=True))
