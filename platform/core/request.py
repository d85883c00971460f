"""A sequence inside the engine: a row of tokens, some computed, some not."""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .lora_request import LoRA
from .messages import PromptTable, SpeculationCounts
from .sampling_params import SamplingParams


class Drafts(NamedTuple):
    """Proposed, unverified continuations of a sequence."""

    token_ids: Sequence[int]
    """May be `kernels.device_outcome.DeviceIds`; reading those on the host waits for the device."""
    probs: Any = None
    """Tensor [len(token_ids), vocab]: the distribution each draft was drawn from; None when drafts are certain
    (n-gram), or when the request's verification does not need it."""
    confidence: Sequence[float] = ()
    """[len(token_ids)] the drafter's own estimate that each draft is accepted if those before it are, made before that
    draft was drawn: it depends on the drafts before it alone. Empty: it has none."""
    forced: bool = False
    """True if a grammar allows no other tokens; they are verified whether or not a drafter is in use."""
    drafter: int = 0
    """Index of the drafter that made them, in `EngineStats.drafters`."""
    match_length: int = 0
    """Tokens at the end of the sequence that occurred before these drafts elsewhere, of prompt lookup; 0: unknown."""

    def truncated(self, k: int) -> Drafts:
        """The first `k` drafts."""
        if k >= len(self.token_ids):
            return self
        probs = None if self.probs is None else self.probs[:k]
        return self._replace(token_ids=self.token_ids[:k], probs=probs, confidence=self.confidence[:k])


NO_DRAFTS = Drafts([])


@dataclass(slots=True)
class TokenCounts:
    """Counts of a sequence's generated tokens, brought up to date when they are read."""

    num_counted: int = 0
    """Leading tokens of the sequence that are counted."""
    entries: array[int] = field(default_factory=lambda: array("q"))
    """One entry for each different token, in the order of their first positions: token << 32 | count; the count is 0
    for a token that is only in the prompt."""
    places: dict[int, int] = field(default_factory=dict)
    """Index of each token's entry."""

    def count(self, tokens: list[int], num_prompt_tokens: int) -> None:
        """Count the new tokens of a sequence: a step costs these, not the whole sequence."""
        for position in range(self.num_counted, len(tokens)):
            token = tokens[position]
            place = self.places.setdefault(token, len(self.entries))
            if place == len(self.entries):
                self.entries.append(token << 32)
            if position >= num_prompt_tokens:
                self.entries[place] += 1
        self.num_counted = len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFacts:
    """Facts about a sequence's `SamplingParams`, kept because every row of every step reads them."""

    edits_logits: bool
    reads_tokens: bool
    """`params.edits_read_tokens`."""
    counts_tokens: bool
    """`params.penalises`."""
    is_plain: bool
    """True when it takes the largest logit after edits and wants no log-probabilities."""
    token_cost: float
    most_tokens: int
    """Most tokens of the sequence: its prompt and `params.max_tokens`."""
    stop_ids: frozenset[int]
    """`params.stop_token_ids`, which may be many: each new token is looked up."""

    @classmethod
    def read(cls, params: SamplingParams, num_prompt_tokens: int) -> SamplingFacts:
        """The facts about a sequence with these parameters."""
        return cls(
            edits_logits=params.edits_logits,
            reads_tokens=params.edits_read_tokens,
            counts_tokens=params.penalises,
            is_plain=params.greedy and params.logprobs is None,
            token_cost=params.token_cost,
            most_tokens=sys.maxsize if params.max_tokens is None else num_prompt_tokens + params.max_tokens,
            stop_ids=frozenset(params.stop_token_ids or ()),
        )


class Status(enum.Enum):
    """State of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Only `Scheduler.commit` adds `tokens`. `num_computed_tokens` changes there, at the start (a hit in
    the prefix cache) and at a preemption. After the commit `ModelRunner.draft` sets `drafts` and `num_draft_computed`.
    """

    request_id: str
    tokens: list[int]
    """Prompt and accepted tokens."""
    num_prompt_tokens: int
    params: SamplingParams
    seed_key: int
    """Seed of 64 bits for all random numbers of this sequence: made from `params.seed`, or drawn by the engine."""
    eos_token_ids: frozenset[int] = frozenset()
    lora: LoRA | None = None
    adapter: Any = None
    """The adapter's handle while admitted; opaque here. It belongs to the adapter manager."""
    cache_salt: str = ""
    sharing: bytes | None = None
    """Key of the requests that may share its KV (tenant, salt); None: no other request."""
    namespace: bytes | None = None
    """Prefix-cache namespace, `sharing` and the adapter's content, set at admission; None keeps it out of the cache."""
    num_shared_tokens: int = 0
    """Leading tokens whose blocks all tenants share: those are in the namespace of the adapter's content alone."""
    num_base_tokens: int = 0
    """Leading tokens that the base model computes although there is an adapter (activated LoRA), set at admission."""
    activation: bytes = b""
    """Namespace of the blocks that follow them, set at admission; their own are in the base model's namespace."""
    shared_namespace: bytes = b""
    """Namespace of the adapter's content alone, set at admission."""
    text_namespace: tuple[bytes, bytes] = (b"", b"")
    """(tenant and salt, digest of the adapter's content); the digest is set at admission. Drafts for this request may
    be learned from requests with the same, and from no other."""
    group: str | None = None
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    arrival_time: float = 0.0

    order: tuple[Any, ...] = (0, 0, 0)
    """(account, rank, arrival), set when it is queued: the smallest runs first. An account's value changes while
    requests wait, so requests of different accounts may change their order; those of one account never do."""
    status: Status = Status.WAITING
    in_flight: list[Any] = field(default_factory=list)
    """Its rows (`batch.RowPlan`) that were launched and are not committed, oldest first: at most one while a step is
    planned; two between the launch of a step and the commit of the one before it."""
    drafts: Drafts = NO_DRAFTS
    """Proposed after the last step, to be verified by the next."""
    num_computed_tokens: int = 0
    """Length of the prefix of `tokens` whose KV is valid."""
    num_draft_computed: int = 0
    """Length of the prefix whose KV is valid in the drafter's own layers."""
    blocks: array[int] = field(default_factory=lambda: array("q"))
    """KV blocks in order; each reference counted by the block pool. An array, since every step copies it."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `tokens`, as far as they have been needed."""
    num_published: int = 0
    """Leading blocks already offered to the prefix cache."""
    num_draft_published: int = 0
    """Leading blocks already known to hold valid KV in the drafter's layers."""
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    """Seconds from its arrival to its admission."""
    num_preemptions: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    speculation_totals: SpeculationCounts | None = None
    """The engine's counts for this request's adapter and tenant, counted together with `speculation`; None when nothing
    is drafted for it."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """Counts of its tokens, for penalties."""
    edit_state: Any = None
    """State of its logits edits; opaque here."""
    grammar: Any = None
    """Position in the grammar of `params.structured_outputs`, set at admission; opaque here."""
    repetition: Any = None
    """Detection of a repeated end of its output, if it is requested; opaque here."""
    prompt_logprobs: PromptTable | None = None
    """Collected while the prompt is computed in chunks."""
    pooled: Any = None
    """Sum of `RowResult.pooled` while the prompt is computed in chunks."""
    sampling: SamplingFacts = field(init=False)

    def handles(self, start: int, count: int) -> list[tuple[Any, int]]:
        """(adapter, number of tokens) for `count` tokens from `start` on."""
        if start >= self.num_base_tokens and count:
            return [(self.adapter, count)]
        num_base = min(max(self.num_base_tokens - start, 0), count)
        return [pair for pair in ((None, num_base), (self.adapter, count - num_base)) if pair[1]]

    def __post_init__(self) -> None:
        self.sampling = SamplingFacts.read(self.params, self.num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_planned(self) -> int:
        """`num_computed_tokens` after the rows in flight are committed, if all of their drafts are right."""
        return self.in_flight[-1].end if self.in_flight else self.num_computed_tokens

    @property
    def awaits_token(self) -> bool:
        """True when a step in flight samples a token that is not in `tokens` yet."""
        return bool(self.in_flight) and self.in_flight[-1].samples

    @property
    def num_pending(self) -> int:
        """Most tokens that the rows in flight can add: one, and all their drafts."""
        return self.in_flight[-1].end + 1 - len(self.tokens) if self.awaits_token else 0

    @property
    def num_unplanned(self) -> int:
        """Number of tokens that no step computes yet; one that is being sampled counts."""
        if not self.in_flight:
            return len(self.tokens) - self.num_computed_tokens
        row = self.in_flight[-1]
        return 1 if row.samples else len(self.tokens) - row.end

    def retire_row(self, row: Any) -> None:
        """Remove a committed `row`, the oldest, from those in flight. A row of a step that did not overlap another is
        not among them."""
        if self.in_flight:
            oldest = self.in_flight.pop(0)
            assert oldest is row, "steps are committed in the order of their launch"

    def rebase_in_flight(self) -> None:
        """Set the start of the rows still in flight to the computed tokens' end: they were planned as if all drafts of
        the step just committed were right."""
        for row in self.in_flight:
            row.start = self.num_computed_tokens

    @property
    def deterministic(self) -> bool:
        """True when the text must not depend on the drafter: greedy, or seeded (drafter-invariant verification)."""
        return self.params.greedy or self.params.seed is not None
