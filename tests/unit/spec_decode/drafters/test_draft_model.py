"""The draft-model drafter against transformers: its drafts are the continuation of the very tokens of the sequence."""

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.kernels.noise import ROUND, Stream, row_keys
from outrider.kernels.noise.torch import gumbel
from outrider.kernels.sampling import filter_logits
from outrider.models.batch import KVLayerSpec, LayerKV, allocate_kv
from outrider.models.checkpoint.loader import load_model
from outrider.platform.core.errors import InvalidRequestError, NotFoundError
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters.base import DrafterNeeds, DraftRow, NoDrafter, Proposal, TargetOutput, no_adapters
from outrider.spec_decode.drafters.draft_model import DraftModelDrafter
from outrider.spec_decode.drafters.factory import DrafterContext, make_drafter
from outrider.spec_decode.drafters.ngram import NgramDrafter

from ..schedules import small_llama

VOCAB, BLOCK, NUM_BLOCKS, MAX_POSITIONS = 97, 4, 64, 96
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Draft:
    path: Path
    reference: LlamaForCausalLM

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[VOCAB] after `tokens`."""
        return self.reference(torch.tensor([tokens])).logits[0, -1].float()

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(tokens) - count :] if count else []


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    path = tmp_path_factory.mktemp("draft")
    return Draft(path, small_llama(path, VOCAB, MAX_POSITIONS))


@dataclass
class Sequence:
    """One request as the engine drives it."""

    request: Request
    block_table: list[int]
    num_computed_tokens: int = 0
    num_draft_computed: int = 0
    drafts: list[int] = field(default_factory=list)

    def row(self, max_drafts: int, chunk: int | None = None) -> DraftRow:
        """After a step that computed `chunk` further tokens, or all of them."""
        tokens = self.request.tokens
        sampled = chunk is None
        self.num_computed_tokens = len(tokens) - 1 if chunk is None else self.num_computed_tokens + chunk
        return DraftRow(
            self.request,
            tokens,
            self.num_computed_tokens,
            self.num_draft_computed,
            max_drafts,
            self.block_table,
            sampled,
        )

    def take(self, proposal: Proposal) -> Proposal:
        self.drafts = proposal.drafts.token_ids
        self.num_draft_computed = proposal.num_draft_computed
        return proposal

    def accept(self, num_accepted: int, next_token: int) -> None:
        """Result of verification: some drafts and a token of the target's."""
        self.request.tokens = self.request.tokens + self.drafts[:num_accepted] + [next_token]
        self.num_draft_computed = min(self.num_draft_computed, len(self.request.tokens) - 1)


class Engine:
    """The drafter with a cache of its own, in which blocks are handed out out of order."""

    def __init__(self, draft: Draft, *, invariant: bool = False, budget: int = 2048) -> None:
        model = load_model(draft.path, dtype="float32")
        self.drafter = DraftModelDrafter(model, invariant=invariant, max_num_batched_tokens=budget)
        self.kv: list[LayerKV] = allocate_kv(self.drafter.needs.kv_layers, NUM_BLOCKS, BLOCK, torch.float32)
        self.drafter.bind(self.kv, no_adapters)
        self.free = list(range(NUM_BLOCKS))
        random.Random(0).shuffle(self.free)

    def sequence(self, length: int, params: SamplingParams = GREEDY, seed: int = 0, blocks: int = 12) -> Sequence:
        rng = random.Random(seed)
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        table = [self.free.pop() for _ in range(blocks)]
        return Sequence(Request(f"r{seed}", tokens, length, params, seed_key=1000 + seed), table)

    def propose(self, *rows: tuple[Sequence, DraftRow]) -> list[Proposal]:
        proposals = self.drafter.propose([row for _, row in rows], TargetOutput())
        return [s.take(proposal) for (s, _), proposal in zip(rows, proposals, strict=True)]

    def step(self, sequence: Sequence, max_drafts: int, chunk: int | None = None) -> Proposal:
        return self.propose((sequence, sequence.row(max_drafts, chunk)))[0]

    def written(self, sequence: Sequence) -> list[bool]:
        """Positions of the sequence that hold KV."""
        keys = self.kv[0].k[:, sequence.block_table].abs().sum(dim=(0, 3)).flatten()
        return (keys > 0).tolist()


def test_greedy_drafts_are_the_continuation(draft: Draft) -> None:
    engine = Engine(draft)
    sequence = engine.sequence(11)
    proposal = engine.step(sequence, 4)
    assert proposal.drafts.token_ids == draft.greedy(sequence.request.tokens, 4)
    assert proposal.drafts.probs is None
    assert proposal.num_draft_computed == 11 + 3
    assert engine.written(sequence) == [True] * 14 + [False] * (12 * BLOCK - 14)


def test_a_row_that_is_computed_to_its_end_still_gets_drafts(draft: Draft) -> None:
    """The first draft needs the last token's logits, whether or not its KV is there."""
    engine = Engine(draft)
    sequence = engine.sequence(11)
    engine.step(sequence, 3)
    sequence.num_draft_computed = 11
    proposal = engine.step(sequence, 3)
    assert proposal.drafts.token_ids == draft.greedy(sequence.request.tokens, 3)
    assert proposal.num_draft_computed == 13


@pytest.mark.parametrize("k", [1, 3, 5])
def test_after_any_number_of_accepted_drafts(draft: Draft, k: int) -> None:
    """Rejected drafts leave KV behind that must not be used."""
    engine = Engine(draft)
    sequence = engine.sequence(5)
    rng = random.Random(k)
    for accepted in [k, 0, *(rng.randint(0, k) for _ in range(3))]:
        proposal = engine.step(sequence, k)
        assert proposal.drafts.token_ids == draft.greedy(sequence.request.tokens, k)
        sequence.accept(min(accepted, len(sequence.drafts)), rng.randrange(VOCAB))


def test_a_prompt_in_chunks_is_computed_when_drafts_are_wanted(draft: Draft) -> None:
    engine = Engine(draft)
    sequence = engine.sequence(21)
    for chunk in (7, 1, 6):
        proposal = engine.step(sequence, 0, chunk)
        assert proposal.drafts.token_ids == []
        assert proposal.num_draft_computed == 0
        assert not any(engine.written(sequence)), "drafts may never be requested"
    assert engine.step(sequence, 3).drafts.token_ids == draft.greedy(sequence.request.tokens, 3)


def test_steps_without_drafts_are_caught_up_later(draft: Draft) -> None:
    engine = Engine(draft)
    sequence = engine.sequence(6)
    engine.step(sequence, 2)
    for token in (5, 6, 7):
        sequence.accept(0, token)
        before = [layer.k.clone() for layer in engine.kv]
        assert engine.step(sequence, 0).drafts.token_ids == []
        assert all(torch.equal(a, b.k) for a, b in zip(before, engine.kv, strict=True))
        assert sequence.num_draft_computed <= len(sequence.request.tokens) - 1
    sequence.accept(0, 8)
    assert engine.step(sequence, 4).drafts.token_ids == draft.greedy(sequence.request.tokens, 4)


def test_ragged_rows_in_one_batch(draft: Draft) -> None:
    """Different k, a prompt chunk, rows without drafts; in each round other numbers are accepted."""
    engine = Engine(draft)
    sequences = [engine.sequence(3 + 2 * i, seed=i, blocks=9) for i in range(5)]
    chunked = engine.sequence(30, seed=9, blocks=9)
    rng = random.Random(1)
    for _ in range(4):
        ks = [rng.randint(0, 4) for _ in sequences]
        rows = [(s, s.row(k)) for s, k in zip(sequences, ks, strict=True)]
        rows.insert(2, (chunked, chunked.row(0, 6)))
        proposals = engine.propose(*rows)
        assert proposals.pop(2).num_draft_computed == chunked.num_computed_tokens
        for sequence, k, proposal in zip(sequences, ks, proposals, strict=True):
            assert proposal.drafts.token_ids == draft.greedy(sequence.request.tokens, k)
            sequence.accept(rng.randint(0, k), rng.randrange(VOCAB))


def test_a_row_that_lags_beyond_the_budget_catches_up_later(draft: Draft) -> None:
    engine = Engine(draft, budget=10)
    long, short = engine.sequence(30, seed=1), engine.sequence(3, seed=2)
    seen = []
    for _ in range(4):
        rows = [(long, long.row(2)), (short, short.row(2))]
        first, second = engine.propose(*rows)
        seen.append((len(first.drafts.token_ids), first.num_draft_computed))
        assert second.drafts.token_ids == draft.greedy(short.request.tokens, 2), "the short one does not wait"
        short.accept(1, 4)
        if first.drafts.token_ids:
            assert first.drafts.token_ids == draft.greedy(long.request.tokens, 2)
    # 7 tokens are left in addition to the short prompt's 3, then 9 in addition to its one new token.
    assert seen == [(0, 7), (0, 16), (0, 25), (2, 31)]


def test_a_request_with_speculation_off_is_not_computed(draft: Draft) -> None:
    engine = Engine(draft)
    off = engine.sequence(9, SamplingParams(temperature=0.0, speculative=False), seed=1)
    on = engine.sequence(9, seed=2)
    proposals = engine.propose((off, off.row(0)), (on, on.row(2)))
    assert proposals[0] == Proposal(proposals[0].drafts, 0)
    assert not any(engine.written(off))
    assert proposals[1].drafts.token_ids == draft.greedy(on.request.tokens, 2)


def test_parts_of_prompts_are_computed_together_with_rows_that_draft(draft: Draft) -> None:
    engine = Engine(draft)
    part, busy = engine.sequence(9, seed=1), engine.sequence(5, seed=2)
    proposals = engine.propose((part, part.row(0)._replace(sampled=False)), (busy, busy.row(1)))
    assert proposals[0].num_draft_computed == 8, "the last token waits for its block"
    assert engine.written(part)[:10] == [True] * 8 + [False] * 2


def test_rows_without_drafts_are_not_computed_with_others(draft: Draft) -> None:
    """A trial of a few rows costs as much as these rows."""
    engine = Engine(draft)
    idle, busy = engine.sequence(9, seed=1), engine.sequence(5, seed=2)
    proposals = engine.propose((idle, idle.row(0)), (busy, busy.row(1)))
    assert proposals[0].num_draft_computed == 0
    assert not any(engine.written(idle))
    assert engine.step(idle, 3).drafts.token_ids == draft.greedy(idle.request.tokens, 3), (
        "it catches up when drafts are requested"
    )


def test_drafts_end_with_the_blocks(draft: Draft) -> None:
    engine = Engine(draft)
    sequence = engine.sequence(7, blocks=2)  # 8 positions: the last draft needs no KV
    assert engine.step(sequence, 5).drafts.token_ids == draft.greedy(sequence.request.tokens, 2)
    full = engine.sequence(9, blocks=2, seed=1)
    assert engine.step(full, 5).drafts.token_ids == []


def test_no_drafts_beyond_the_draft_models_positions(draft: Draft) -> None:
    engine = Engine(draft)
    sequence = engine.sequence(MAX_POSITIONS - 1, blocks=30)
    assert engine.step(sequence, 5).drafts.token_ids == draft.greedy(sequence.request.tokens, 2)
    sequence.accept(2, 3)
    assert engine.step(sequence, 5).drafts.token_ids == []
    assert sequence.num_draft_computed == MAX_POSITIONS


@pytest.mark.parametrize(("seed", "invariant"), [(5, False), (None, True)])
def test_coupled_drafts_use_the_targets_noise(draft: Draft, seed: int | None, invariant: bool) -> None:
    engine = Engine(draft, invariant=invariant)
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, seed=seed)
    sequence = engine.sequence(8, params)
    proposal = engine.step(sequence, 4)
    assert proposal.drafts.probs is None
    tokens = list(sequence.request.tokens)
    for token in proposal.drafts.token_ids:
        logits = filter_logits(draft.logits(tokens)[None], [0.8], [30], [0.9], [0.01])
        noise = gumbel(row_keys([sequence.request.seed_key], [len(tokens)], Stream.TARGET), VOCAB)
        assert token == (logits.log_softmax(-1) + noise).argmax().item()
        tokens.append(token)


def test_independent_drafts_come_with_their_distribution(draft: Draft) -> None:
    engine = Engine(draft)
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01)
    sequence = engine.sequence(8, params)
    proposal = engine.step(sequence, 3)
    assert proposal.drafts.probs.shape == (3, VOCAB)
    tokens = list(sequence.request.tokens)
    first = len(tokens) * ROUND
    for i, (token, q) in enumerate(zip(proposal.drafts.token_ids, proposal.drafts.probs, strict=True)):
        expected = filter_logits(draft.logits(tokens)[None], [0.8], [30], [0.9], [0.01]).softmax(-1)[0]
        assert torch.allclose(q, expected, atol=1e-5)
        noise = gumbel(row_keys([sequence.request.seed_key], [first + i], Stream.DRAFT), VOCAB)[0]
        assert token == (q.log() + noise).argmax().item()
        tokens.append(token)


def test_mixed_rules_in_one_batch_are_as_alone(draft: Draft) -> None:
    kinds = [GREEDY, SamplingParams(seed=3), SamplingParams(), SamplingParams(temperature=0.5, top_k=5)]
    together = Engine(draft)
    sequences = [together.sequence(6 + i, params, seed=i) for i, params in enumerate(kinds)]
    proposals = together.propose(*((s, s.row(2 + i % 2)) for i, s in enumerate(sequences)))
    for i, (params, proposal) in enumerate(zip(kinds, proposals, strict=True)):
        engine = Engine(draft)
        alone = engine.step(engine.sequence(6 + i, params, seed=i), 2 + i % 2)
        assert alone.drafts.token_ids == proposal.drafts.token_ids
        assert (alone.drafts.probs is None) == (proposal.drafts.probs is None)


# --- composition --------------------------------------------------------------------------------------------------


def make(
    draft: Draft | None,
    vocab_size: int = VOCAB,
    folder: Path | None = None,
    rounding: str | None = None,
    **config: object,
):
    if draft is not None:
        config = {"method": "draft_model", "model": str(draft.path), **config}
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size))
    model_path = None if folder is None else str(folder)
    context = DrafterContext(target=target, model_path=model_path, device="cpu", dtype="float32", quantization=rounding)
    return make_drafter(parse_speculative(config or None), context)


def test_composition(draft: Draft) -> None:
    assert isinstance(make(None), NoDrafter)
    assert isinstance(make(None, method="ngram", num_speculative_tokens=3), NgramDrafter)
    assert isinstance(make(None, method="ngram"), NgramDrafter)
    drafter = make(draft, adaptive=False)
    assert isinstance(drafter, DraftModelDrafter)
    assert drafter.needs.kv_layers == (KVLayerSpec(2, 8),) * 2


def test_weights_are_quantised_as_the_targets_by_default(draft: Draft) -> None:
    def size(**options: Any) -> int:
        return sum(linear.packed.num_bytes for linear in make(draft, **options).needs.linears)

    assert size(quantization="int8") < size(quantization="none") == size()
    assert size(rounding="int8") == size(quantization="int8")
    assert size(rounding="int8", quantization="none") == size()


def test_another_vocabulary_is_refused(draft: Draft) -> None:
    with pytest.raises(InvalidRequestError, match=r"97 tokens.* 128") as caught:
        make(draft, vocab_size=128)
    assert caught.value.param == "speculative_config"


def write_tokenizer(folder: Path, vocabulary: object, added: Any = ()) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return folder


@pytest.mark.parametrize(
    ("vocabulary", "added", "said"),
    [
        ({"a": 0, "b": 1, "c": 2}, [{"id": 3, "content": "<s>"}], None),
        ([["a", -1.0], ["b", -2.0], ["c", -3.0], ["<s>", 0.0]], [], None),
        ({"a": 0, "b": 1, "c": 2}, [{"id": 4, "content": "<s>"}], "75.0% of the tokens agree"),
        ({"a": 1, "b": 0, "c": 2}, [{"id": 3, "content": "<s>"}], "50.0% of the tokens agree"),
    ],
)
def test_a_differing_tokenizer_is_reported(
    draft: Draft, tmp_path: Path, caplog: pytest.LogCaptureFixture, vocabulary: object, added: Any, said: str | None
) -> None:
    shutil.copytree(draft.path, tmp_path / "draft")
    write_tokenizer(tmp_path / "draft", vocabulary, added)
    target = write_tokenizer(tmp_path / "target", {"a": 0, "b": 1, "c": 2}, [{"id": 3, "content": "<s>"}])
    for vocab_size in (VOCAB, VOCAB - 7, VOCAB + 30):
        make(None, vocab_size, target, method="draft_model", model=str(tmp_path / "draft"), adaptive=False)
    warnings = [message for message in caplog.messages if "of the tokens agree" in message]
    assert len(warnings) == (0 if said is None else 3)
    assert all(said in message for message in warnings if said is not None)


def test_another_tokenizer_with_a_vocabulary_of_another_size_is_refused(draft: Draft, tmp_path: Path) -> None:
    shutil.copytree(draft.path, tmp_path / "draft")
    write_tokenizer(tmp_path / "draft", {"x": 0, "y": 1, "c": 2})
    target = write_tokenizer(tmp_path / "target", {"a": 0, "b": 1, "c": 2})
    with pytest.raises(InvalidRequestError, match=r"97 tokens.* 98.*33.3%"):
        make(None, VOCAB + 1, target, method="draft_model", model=str(tmp_path / "draft"))


def test_a_missing_draft_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        make(None, method="draft_model", model=str(tmp_path / "nothing"))


def test_without_speculation_nothing_is_proposed(draft: Draft) -> None:
    sequence = Engine(draft).sequence(5)
    drafter = NoDrafter()
    drafter.bind([], no_adapters)
    assert drafter.needs == DrafterNeeds()
    assert drafter.propose([sequence.row(3)], TargetOutput())[0].drafts.token_ids == []
