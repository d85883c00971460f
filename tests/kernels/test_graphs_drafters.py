"""Drafters whose passes are replayed, logits and most likely tokens included, draft what they draft piece by piece."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from outrider.models import attention
from outrider.models.attention import triton as triton_attention
from outrider.models.attention.triton import TritonAttention
from outrider.models.batch import LayerKV, allocate_kv
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.graphed_rows import GraphedRows
from outrider.models.pass_graphs import PassGraphs
from outrider.models.pass_grid import PassLimits
from outrider.models.rope_config import RopeConfig
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.platform.engine.sampling.logits_edits import edit_draft_logits
from outrider.spec_decode.drafters.base import DraftRow, Proposal, TargetOutput, no_adapters
from outrider.spec_decode.drafters.factory import DrafterContext, make_drafter
from outrider.spec_decode.drafters.medusa import drafter as medusa
from outrider.spec_decode.verify import draft_sampling as drawing

from .call_tape import CallTape, graph_backend, without_native_kernels

VOCAB, DRAFT_VOCAB, HIDDEN, BLOCK, NUM_BLOCKS, DRAFTS = 61, 40, 32, 16, 24, 3
CONFIG = DecoderConfig(
    **{"architecture": "LlamaForCausalLM", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48},
    **{"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "max_position_embeddings": 128},
    **{"rms_norm_eps": 1e-6, "rope": RopeConfig(rope_type="default", theta=1e4), "tie_word_embeddings": True},
    **{"windows": (None, None), "qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False},
    dtype=torch.float32,
)
DECODER = {
    **{"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"hidden_act": "silu", "dtype": "float32", "model_type": "llama"},
}
FILES: dict[str, dict[str, Any]] = {
    "draft_model": DECODER | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
    "translated": DECODER | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 50},
    "eagle": DECODER | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
    "eagle3": DECODER
    | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
    | {"target_hidden_size": HIDDEN, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    "peagle": DECODER
    | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2, "draft_vocab_size": DRAFT_VOCAB}
    | {"ptd_token_id": 3, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    "medusa": {"medusa_num_heads": DRAFTS, "medusa_num_layers": 1},
    "dflash": DECODER
    | {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "head_dim": 16, "block_size": 5}
    | {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1]}},
    "dspark": DECODER
    | {"architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 1, "head_dim": 16, "block_size": 5}
    | {"mask_token_id": 7, "target_layer_ids": [0, 1], "markov_rank": 4, "markov_head_type": "rnn"},
    "uno": {"peft_type": "LORA"},
}
GREEDY = SamplingParams(temperature=0.0)
BIASED = SamplingParams(temperature=0.0, logit_bias={5: 6.0, 9: -6.0})
SEEDED = SamplingParams(temperature=0.8, seed=4)
SAMPLED = SamplingParams(temperature=0.9, top_k=20)


class Side:
    """One drafter with a cache of its own."""

    def __init__(self, method: str, folder: Path, device: str, graphs: PassGraphs | None) -> None:
        target = Decoder(CONFIG, device)
        for index, slot in enumerate(target.weight_slots().values()):
            generator = torch.Generator().manual_seed(index)
            slot.load(torch.randn(slot.shape, generator=generator) * slot.shape[-1] ** -0.5)
        named = {"peagle": "eagle3", "translated": "draft_model"}.get(method, method)
        options = {"method": named, "model": str(folder), "num_speculative_tokens": DRAFTS}
        context = DrafterContext(
            target=target, device=device, dtype="float32", load_format="dummy", edit_logits=edit_draft_logits,
            max_model_len=100, graphs=graphs, model_path=str(folder / "target"),
        )  # fmt: skip
        self.device = device
        self.proposer: Any = make_drafter(parse_speculative(options), context)
        if named == "eagle3":  # its tokens are others of the target's
            self.proposer._head.weight_slots()["d2t"].load(torch.full((DRAFT_VOCAB,), VOCAB - DRAFT_VOCAB))
        layers = target.kv_layers if named == "uno" else self.proposer.needs.kv_layers
        self.kv: list[LayerKV] = allocate_kv(layers, NUM_BLOCKS, BLOCK, torch.float32, device)
        self.proposer.bind(self.kv, no_adapters)

    def propose(self, rows: Sequence[DraftRow], states: torch.Tensor) -> list[Proposal]:
        there = states.to(self.device)
        aux = tuple(there + i for i in range(len(self.proposer.needs.aux_layers)))
        return self.proposer.propose(rows, TargetOutput(there, aux))


def _positions(cache: torch.Tensor, block_table: list[int], count: int) -> torch.Tensor:
    """Keys or values of a sequence's first positions, but of the first one: EAGLE heads have none there."""
    return cache[:, block_table].flatten(1, 2)[:, 1:count]


@dataclasses.dataclass
class Running:
    """One request as the engine drives it."""

    request: Request
    block_table: list[int]
    num_computed_tokens: int = 0
    num_draft_computed: int = 0


class Pair:
    """The same steps with and without graphs."""

    def __init__(self, plain: Side, graphed: Side, graphs: PassGraphs) -> None:
        self.plain, self.graphed, self.graphs = plain, graphed, graphs
        self.blocks = iter(range(NUM_BLOCKS))

    def sequences(self, params: Sequence[SamplingParams], rng: random.Random) -> list[Running]:
        made = []
        for index, one in enumerate(params):
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 5))]
            request = Request(f"r{index}", tokens, len(tokens), one, seed_key=index)
            made.append(Running(request, [next(self.blocks) for _ in range(4)]))
        return made

    def step(self, sequences: Sequence[Running], wanted: Sequence[int], rng: random.Random) -> list[list[int]]:
        """All tokens but the last are computed by the target, and drafted for; some drafts are accepted. The drafts."""
        rows, first = [], 0
        for sequence, most in zip(sequences, wanted, strict=True):
            tokens, start = list(sequence.request.tokens), sequence.num_computed_tokens
            rows.append(
                DraftRow(
                    sequence.request, tokens, len(tokens) - 1, sequence.num_draft_computed, most,
                    sequence.block_table, True, start, first,
                )
            )  # fmt: skip
            sequence.num_computed_tokens = len(tokens) - 1
            first += len(tokens) - 1 - start
        states = torch.randn(first, HIDDEN, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        plain, graphed = self.plain.propose(rows, states), self.graphed.propose(rows, states)
        drafted = [list(proposal.drafts.token_ids) for proposal in graphed]
        assert drafted == [list(proposal.drafts.token_ids) for proposal in plain]
        assert [len(ids) for ids in drafted] == list(wanted)
        assert [p.num_draft_computed for p in graphed] == [p.num_draft_computed for p in plain]
        for ours, theirs in zip(graphed, plain, strict=True):
            assert (ours.drafts.probs is None) == (theirs.drafts.probs is None)
            if ours.drafts.probs is not None:
                torch.testing.assert_close(ours.drafts.probs.cpu(), theirs.drafts.probs, atol=1e-4, rtol=1e-3)
        for sequence, proposal in zip(sequences, graphed, strict=True):
            for ours, theirs in zip(self.graphed.kv, self.plain.kv, strict=True):
                for mine, other in zip(ours[:2], theirs[:2], strict=True):
                    keys = [_positions(of, sequence.block_table, proposal.num_draft_computed) for of in (mine, other)]
                    torch.testing.assert_close(keys[0].cpu(), keys[1], atol=1e-4, rtol=1e-3)
        for sequence, proposal, ids in zip(sequences, graphed, drafted, strict=True):
            tokens = sequence.request.tokens + ids[: rng.randint(0, len(ids))]
            sequence.num_draft_computed = min(proposal.num_draft_computed, len(tokens))
            sequence.request.tokens = [*tokens, rng.randrange(VOCAB)]
        return drafted


@pytest.fixture
def make_pair(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Pair]:
    def make(method: str, max_rows: int = 4) -> Pair:
        for name in ("config.json", "adapter_config.json"):
            (tmp_path / name).write_text(json.dumps(FILES[method]))
        if method == "translated":  # the draft model lacks the last tokens, and has the others in reverse order
            (tmp_path / "target").mkdir()
            vocabularies = {tmp_path: {f"t{49 - i}": i for i in range(50)}}
            vocabularies[tmp_path / "target"] = {f"t{i}": i for i in range(VOCAB)}
            for folder, vocabulary in vocabularies.items():
                (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        plain = Side(method, tmp_path, "cpu", None)
        limits = PassLimits(max_rows, 100, max_tokens=24, max_drafts=5, has_loops=True)
        graphs = PassGraphs(graph_backend(device, lazily=True), limits)
        monkeypatch.setattr(drawing, "stays_on_device", lambda logits: True)
        if device != "cuda":
            monkeypatch.setattr(attention, "best_backend", lambda spec, *, batch_invariant: TritonAttention)
            planner = triton_attention.Planner
            monkeypatch.setattr(
                triton_attention, "Planner", lambda shape, size, gpu, _, *rest: planner(shape, size, gpu, 1, *rest)
            )
            without_native_kernels(monkeypatch)
        graphed = Side(method, tmp_path, device, graphs)
        graphs.capture_ahead()
        return Pair(plain, graphed, graphs)

    return make


@pytest.mark.parametrize("method", sorted(FILES))
@pytest.mark.parametrize("params", [[GREEDY] * 3, [GREEDY, BIASED, SEEDED, SAMPLED]], ids=["greedy", "mixed"])
def test_drafts_are_the_same(make_pair: Callable[..., Pair], method: str, params: list[SamplingParams]) -> None:
    """Rows that want different numbers, and padding; many replays of what was captured for other rows."""
    pair, rng = make_pair(method), random.Random(1)
    sequences = pair.sequences(params, rng)
    most = [DRAFTS] * len(params)
    drafted = [pair.step(sequences, most, rng)]  # prompts, too, are short enough
    ragged = [[2, 0, 3, 1][: len(params)], [1, 3, 0, 3][: len(params)]]
    drafted += [pair.step(sequences, wanted, rng) for wanted in (most, *ragged, most)]
    assert len({tuple(ids) for step in drafted for ids in step}) > 5
    assert pair.graphs.num_replayed >= 5
    assert pair.graphs.num_single == 0
    if isinstance(pair.graphs.backend, CallTape):
        assert 0 < len(pair.graphs.backend.num_calls) < pair.graphs.num_replayed


def _count_logits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counter of the graphed drafter's calls that make logits, from here on."""
    proposer = pair.graphed.proposer
    owner, name = (
        (proposer._model, "compute_logits") if hasattr(proposer, "_model")
        else (proposer._head, "logits") if hasattr(proposer, "_head")
        else (proposer._heads, "logits")
    )  # fmt: skip
    made, calls = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(1) or made(*args, **kwargs))
    return calls


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_one_replay_makes_all_drafts(
    make_pair: Callable[..., Pair], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows: nothing is computed outside the capture, and no draft changes with a later replay."""
    pair, rng = make_pair(method), random.Random(2)
    sequences = pair.sequences([GREEDY, GREEDY], rng)
    for sequence in sequences:
        sequence.request.tokens = [*sequence.request.tokens[:1], 7]
    pair.step(sequences, [DRAFTS] * 2, rng)
    calls, argmax = _count_logits(pair, monkeypatch), torch.Tensor.argmax
    replayed = pair.graphs.num_replayed
    monkeypatch.setattr(torch.Tensor, "argmax", lambda *args, **kwargs: calls.append(1) or argmax(*args, **kwargs))
    rows = [
        DraftRow(s.request, list(s.request.tokens[:2]), 1, 0, DRAFTS, s.block_table, True, 0, index)
        for index, s in enumerate(sequences)
    ]
    kept = []
    for seed in range(3):
        states = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(seed))
        for row in rows:
            row.tokens[-1] = 10 + seed
        proposals = pair.graphed.propose(rows, states)
        kept.append(proposals)
    assert pair.graphs.num_replayed == replayed + 3
    assert calls == []
    monkeypatch.undo()
    for seed, proposals in enumerate(kept):
        states = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(seed))
        for row in rows:
            row.tokens[-1] = 10 + seed
        wanted = pair.plain.propose(rows, states)
        assert [list(p.drafts.token_ids) for p in proposals] == [list(p.drafts.token_ids) for p in wanted]


def test_heads_of_too_many_rows_run_without_a_graph(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits that they would keep are bounded."""
    monkeypatch.setattr(medusa, "MAX_LOGITS_BYTES", 2 * 4 * DRAFTS * VOCAB)
    pair, rng = make_pair("medusa"), random.Random(3)
    pair.step(pair.sequences([GREEDY] * 3, rng), [DRAFTS] * 3, rng)
    assert pair.graphs.num_replayed == 0
    pair.step(pair.sequences([GREEDY] * 2, rng), [DRAFTS] * 2, rng)
    assert pair.graphs.num_replayed == 1


class Gains:
    """Adapters with gains: no graph serves them."""

    replayable = False


@torch.inference_mode()
def test_rows_are_padded_unless_replay_is_impossible(device: str) -> None:
    graphs = PassGraphs(graph_backend(device), PassLimits(6, 64))
    seen: list[list[tuple[Any, int]]] = []

    def prepare(rows: Sequence[tuple[Any, int]], *, always: bool = False) -> Any:
        seen.append(list(rows))
        return Gains() if any(adapter == "dora" for adapter, _ in rows) else None

    def compute(states: torch.Tensor, adapters: Any, count: int) -> tuple[torch.Tensor, ...]:
        return (torch.stack([states * part for part in range(count)]),)

    passes = GraphedRows(graphs, torch.zeros(6, 2, device=device), compute, prepare, 3)
    graphs.capture_ahead()
    assert graphs.num_captured == 5 * 2, "1, 2, 3, 4 or 6 rows, 2 or 3 parts"
    for seed, (rows, count) in enumerate([(5, 2), (6, 1), (5, 2), (5, 3), (1, 2)]):
        states = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed)).to(device)
        found = passes.run(states, [None] * rows, count)
        assert found is not None
        assert all(torch.equal(found[0][part, :rows], states * part) for part in range(count))
    assert seen[-5] == [*[(None, 1)] * 5, (None, 1)]
    assert (graphs.num_captured, graphs.num_replayed, graphs.num_single) == (10, 5, 0)
    assert passes.run(torch.zeros(2, 2, device=device), ["dora", None], 2) is None
    assert passes.run(torch.zeros(7, 2, device=device), [None] * 7, 2) is None
    assert passes.run(torch.zeros(2, 2, device=device), [None] * 2, 4) is None
    assert (graphs.num_replayed, graphs.num_single) == (5, 3)
