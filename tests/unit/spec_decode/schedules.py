"""Drafters that have layers of their own, as the engine drives them: their blocks, and schedules made at random."""

import random
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.kernels.noise import ROUND, Stream, row_keys
from outrider.kernels.noise.torch import gumbel
from outrider.kernels.sampling import filter_logits
from outrider.models.batch import allocate_kv
from outrider.platform.core.request import NO_DRAFTS, Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.base import DraftRow, Proposal, TargetOutput, no_adapters

BLOCK, NUM_BLOCKS = 4, 96
GREEDY = SamplingParams(temperature=0.0)


def small_llama(path, vocab_size: int, max_positions: int = 256) -> LlamaForCausalLM:
    """A draft model in transformers, in float32, with weights that differ much; saved to `path`."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(path)
    return model


@dataclass
class Sequence:
    """One request as the engine drives it."""

    request: Request
    table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_draft_computed: int = 0
    drafts: Drafts = NO_DRAFTS


class Engine:
    """A drafter with blocks of its own; the target is transformers', computed whole for every step.

    `drafts_count`: what was computed of drafts stays valid once they are accepted, as a draft model's does.
    """

    def __init__(self, target, drafter, rng=None, *, drafts_count: bool = False, is_rated: bool = False) -> None:
        self.target, self.drafter, self.rng = target, drafter, rng or random.Random(0)
        self.drafts_count, self.is_rated = drafts_count, is_rated
        self.kv = allocate_kv(drafter.needs.kv_layers, NUM_BLOCKS, BLOCK, torch.float32)
        drafter.bind(self.kv, no_adapters)
        self.free = list(range(NUM_BLOCKS))
        self.rng.shuffle(self.free)
        self.references: dict[int, int] = {}
        self.count = 0

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.target.vocab_size) for _ in range(count)]

    def sequence(self, length: int, params: SamplingParams = GREEDY) -> Sequence:
        self.count += 1
        return Sequence(Request(f"r{self.count}", self.tokens(length), length, params, seed_key=1000 + self.count))

    def reserve(self, sequence: Sequence, count: int) -> None:
        while len(sequence.table) * BLOCK < count:
            sequence.table.append(self.free.pop())
            self.references[sequence.table[-1]] = 1

    def release(self, sequence: Sequence) -> None:
        """The last freed block is the next allocated."""
        for block in sequence.table:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
        sequence.table, sequence.num_computed_tokens, sequence.num_draft_computed = [], 0, 0
        sequence.drafts = NO_DRAFTS

    def share(self, donor: Sequence, num_blocks: int, num_drafted: int, more: int) -> Sequence:
        """A request that the prefix cache has `num_blocks` of, the first `num_drafted` of them with draft KV."""
        sequence = self.sequence(0)
        sequence.request.tokens = donor.request.tokens[: num_blocks * BLOCK] + self.tokens(more)
        sequence.table = donor.table[:num_blocks]
        for block in sequence.table:
            self.references[block] += 1
        sequence.num_computed_tokens, sequence.num_draft_computed = num_blocks * BLOCK, num_drafted * BLOCK
        return sequence

    def row(self, sequence: Sequence, k: int, chunk: int | None, accepted: int, first_index: int):
        """The row of a step and the tokens that the target computed in it."""
        tokens, start = sequence.request.tokens, sequence.num_computed_tokens
        if chunk is not None and chunk < len(tokens) - start:
            self.reserve(sequence, start + chunk)
            valid = min(sequence.num_draft_computed, len(tokens))
            row = DraftRow(
                sequence.request, tokens, start + chunk, valid, 0, list(sequence.table), False, start, first_index
            )
            return row, tokens[: start + chunk]
        drafts = sequence.drafts.token_ids
        accepted = min(accepted, len(drafts))
        after = tokens + drafts[:accepted] + self.tokens(1)
        self.reserve(sequence, len(tokens) + len(drafts) + k + self.drafter.needs.more_slots)
        row = DraftRow(
            sequence.request,
            after,
            num_valid=len(after) - 1,
            num_draft_valid=min(sequence.num_draft_computed, len(tokens) + accepted),
            max_drafts=k,
            block_table=list(sequence.table),
            sampled=True,
            start=start,
            first_index=first_index,
            num_drafts=len(drafts),
            num_accepted=accepted,
            is_rated=self.is_rated,
        )
        return row, tokens + drafts

    def step(self, *work: tuple) -> list[Drafts]:
        """work: (sequence, k, chunk or None, drafts accepted) each."""
        rows, states, total = [], [], 0
        for sequence, k, chunk, accepted in work:
            row, computed = self.row(sequence, k, chunk, accepted, total)
            rows.append(row)
            states.append([state[row.start :] for state in self.target.states(computed)])
            total += len(computed) - row.start
        joined = [torch.cat(parts) for parts in zip(*states, strict=True)]
        output = TargetOutput()
        if joined:
            output = TargetOutput(joined[-1], tuple(joined[i] for i in self.drafter.needs.aux_layers))
        for sequence, *_ in work:
            sequence.request.blocks = sequence.table
        if any(row.max_drafts or row.num_drafts for row in rows) or self.rng.random() < 0.5:
            proposals = self.drafter.propose(rows, output)
        else:
            self.drafter.watch(rows, output)
            lags = self.drafter.needs.lags
            proposals = [Proposal(NO_DRAFTS, row.num_draft_valid if lags else len(row.tokens)) for row in rows]
        for (sequence, k, *_), row, proposal in zip(work, rows, proposals, strict=True):
            assert len(proposal.drafts.token_ids) <= k
            ahead = max(0, len(proposal.drafts.token_ids) - 1) if self.drafts_count else 0
            assert proposal.num_draft_computed <= len(row.tokens) + ahead, "not computed by any pass"
            sequence.request.tokens, sequence.num_computed_tokens = row.tokens, row.num_valid
            sequence.drafts, sequence.num_draft_computed = proposal
        return [proposal.drafts for proposal in proposals]


def random_schedule(engine: Engine, head, rng: random.Random, steps: int, whole: bool) -> None:
    """Chunks, spells without drafts, any acceptance, shared blocks with or without draft KV, preemption, reuse.

    Args:
        head: its `check_greedy` judges the drafts after every step.
        whole: every row gets all requested drafts: the budget of a catch-up pass is large.
    """
    running = [engine.sequence(rng.randint(1, 14)) for _ in range(2)]
    for _ in range(steps):
        event = rng.random()
        if event < 0.15 and len(running) > 1:
            engine.release(running.pop(rng.randrange(len(running))))
        elif event < 0.3:
            engine.release(rng.choice(running))  # preempted: computed again, from other blocks
        elif event < 0.55 and len(running) < 4:
            donor = rng.choice(running)
            blocks = rng.randint(0, donor.num_computed_tokens // BLOCK)
            drafted = rng.randint(0, min(blocks, donor.num_draft_computed // BLOCK))
            running.append(engine.share(donor, blocks, drafted, rng.randint(1, 6)))
        elif event < 0.65 and len(running) < 4:
            running.append(engine.sequence(rng.randint(1, 14)))
        quiet = rng.random() < 0.4
        work = []
        for sequence in rng.sample(running, rng.randint(1, len(running))):
            chunk = rng.randint(1, 6) if rng.random() < 0.3 else None
            work.append((sequence, 0 if quiet else rng.randint(0, 4), chunk, rng.randint(0, 4)))
        asked = [
            k and not (chunk is not None and chunk < len(s.request.tokens) - s.num_computed_tokens)
            for s, k, chunk, _ in work
        ]
        for (sequence, k, *_), wants, drafts in zip(work, asked, engine.step(*work), strict=True):
            if whole:
                assert len(drafts.token_ids) == (k if wants else 0)
            head.check_greedy(sequence.request.tokens, drafts.token_ids)


def check_sampled(sequences, head, vocab_size: int, rule: str) -> None:
    """The drafts of the first and the last sequence have been drawn from the head's filtered distribution, with the
    noise of `rule`; those of the second are greedy."""
    for sequence in (sequences[0], sequences[2]):
        ids, probs, *_ = sequence.drafts
        tokens = list(sequence.request.tokens)
        for i, logits in enumerate(head.logits(tokens, ids)):
            filtered = filter_logits(logits[None].clone(), [0.8], [30], [0.9], [0.01])
            stream, step = (Stream.DRAFT, ROUND) if rule == "independent" else (Stream.TARGET, 1)
            noise = gumbel(row_keys([sequence.request.seed_key], [len(tokens) * step + i], stream), vocab_size)
            scores = (filtered.log_softmax(-1) + noise)[0]
            assert scores[ids[i]] >= scores.max() - 1e-4
            if rule == "independent":
                assert torch.allclose(probs[i], filtered.softmax(-1)[0], atol=1e-4)
        assert (probs is not None) == (rule == "independent")
    head.check_greedy(sequences[1].request.tokens, sequences[1].drafts.token_ids)
