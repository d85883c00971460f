"""A simulated device for the scheduler's tests: it records the content of every KV slot."""

from __future__ import annotations

import random
from hashlib import blake2b

from outrider.platform.core.batch import RowResult, StepResult
from outrider.platform.core.request import NO_DRAFTS, Drafts, Status
from outrider.platform.engine.queue.gates import DraftLimits

BLOCK, VOCAB = 4, 50
NO_SPECULATION = DraftLimits()


def next_token(tokens):
    """The simulated model: a fixed function of the whole prefix."""
    return blake2b(bytes(tokens), digest_size=1).digest()[0] % VOCAB


def check_apart(plan):
    """Check that no row reads a block that another one writes: rows of a step run at the same time, and the GPU kernel
    that attends also writes its row's new keys."""
    written = [set(row.request.blocks[row.start // BLOCK : -(-row.end // BLOCK)]) for row in plan.rows]
    for reader in plan.rows:
        read = set(reader.request.blocks[: -(-reader.end // BLOCK)])
        for writer, blocks in zip(plan.rows, written, strict=True):
            assert writer is reader or not read & blocks, "a row reads a block that another row writes in the same step"


class Device:
    """Checks that a step reads exactly the right tokens from its blocks, then returns results like a model with a
    proposer."""

    def __init__(self, num_blocks, limits=NO_SPECULATION, skill=0.7, lag=0.2, seed=0):
        self.kv = {}  # slot -> token, the target's layer
        self.draft_kv = {}
        self.host = {}  # slot of the host -> contents of a block in both layers
        self.limits, self.skill, self.lag = limits, skill, lag
        self.random = random.Random(seed)

    def run(self, plan):
        for block, slot, to_host in plan.moves:
            places = range(block * BLOCK, (block + 1) * BLOCK)
            for layer, kept in zip((self.kv, self.draft_kv), self.host.setdefault(slot, ({}, {})), strict=True):
                for offset, place in enumerate(places):
                    if to_host:
                        kept[offset] = layer.get(place)
                    else:
                        layer[place] = kept[offset]
        check_apart(plan)
        return StepResult([self._row(row) for row in plan.rows])

    def _row(self, row):
        request = row.request
        inputs = (request.tokens + request.drafts.token_ids)[row.start : row.end]
        assert len(inputs) == row.num_tokens > 0
        assert row.num_drafts == len(request.drafts.token_ids)
        for position, token in enumerate(inputs, row.start):
            self.kv[self._slot(request, position)] = token
        sequence = request.tokens + request.drafts.token_ids
        held = [self.kv[self._slot(request, position)] for position in range(row.end)]
        assert held == sequence[: row.end], "a KV slot holds another sequence's token"
        if not row.samples:
            assert row.end < len(request.tokens)
            return RowResult([])
        tokens = list(request.tokens)
        accepted = []
        for draft in request.drafts.token_ids:
            if draft != next_token(tokens + accepted):
                break
            accepted.append(draft)
        return RowResult([*accepted, next_token(tokens + accepted)], len(accepted))

    def draft(self, plan):
        """After the commit."""
        for row in plan.rows:
            request = row.request
            if request.status is Status.RUNNING:
                assert request.drafts == NO_DRAFTS
                if row.samples:
                    self._propose(row)
                else:
                    request.num_draft_computed = self._catch_up(request, request.tokens, row.end)

    def _propose(self, row):
        request, tokens = row.request, row.request.tokens
        valid = request.num_draft_computed
        drafts = []
        while len(drafts) < row.max_new_drafts and self.random.random() < 0.9:
            right = self.random.random() < self.skill
            drafts.append(next_token(tokens + drafts) if right else self.random.randrange(VOCAB))
        if self.limits.extra_slots and self.random.random() >= self.lag:
            valid = self._catch_up(request, tokens + drafts[:-1], request.num_computed_tokens)
            for position in range(valid, len(tokens) + len(drafts) - 1):
                self.draft_kv[self._slot(request, position)] = (tokens + drafts)[position]
            valid = len(tokens) + max(0, len(drafts) - 1) if drafts else valid
        request.drafts, request.num_draft_computed = Drafts(drafts), valid

    def _catch_up(self, request, tokens, end):
        valid = min(request.num_draft_computed, len(tokens))
        if not self.limits.extra_slots:
            return 0
        for position in range(valid):
            assert self.draft_kv[self._slot(request, position)] == tokens[position], "the draft layer is stale"
        for position in range(valid, end):
            self.draft_kv[self._slot(request, position)] = tokens[position]
        return max(valid, end)

    @staticmethod
    def _slot(request, position):
        return request.blocks[position // BLOCK] * BLOCK + position % BLOCK


def compute(scheduler, device, plan):
    """Run a planned step; returns its deltas."""
    deltas = scheduler.commit(plan, device.run(plan))
    device.draft(plan)
    return deltas
