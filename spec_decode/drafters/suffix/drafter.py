"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications").

Two suffix trees give the continuations of the last tokens: a tree of the request's own tokens, prompt included, and a
tree of the outputs of past requests of the same text namespace (tenant, salt and content of the adapter).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ....platform.core.request import NO_DRAFTS, Drafts, Request, Status
from ....platform.core.speculative_config import SpeculativeConfig
from ..base import Drafter, DraftRow, Proposal, TargetOutput
from ..factory import DrafterContext
from .tree import NOTHING, Continuation, Place, SuffixTree, Text

Namespace = tuple[bytes, bytes]
"""See `Request.text_namespace`."""

MAX_STORED_TOKENS = 1 << 18
"""Most tokens of past outputs that are remembered, over all namespaces. One takes up to about 400 bytes in a tree, so
that all trees take up to 100 MB."""
MAX_OWN_TOKENS = 1 << 14
"""Most tokens of a running request in its own tree; of a longer request the last half of these are kept."""
STEP_TOKENS = 256
"""Most tokens of prompts and past outputs that a step adds to or removes from trees, at some 10 microseconds each, in
addition to its sampled tokens: a long text must not delay other requests."""


class _Output(Text):
    """A finished request's output in a store."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.namespace = namespace


class OutputStores:
    """Suffix trees of past outputs, one a namespace, bounded together: the oldest outputs are dropped first."""

    def __init__(self, depth: int, max_outputs: int, max_tokens: int = MAX_STORED_TOKENS) -> None:
        self.num_tokens = 0
        """Tokens of all outputs that are remembered."""
        self.version = 0
        """Version, which changes whenever a tree may have new text."""
        self._depth = depth
        self._max_outputs = max_outputs
        self._max_tokens = max_tokens
        self._trees: dict[Namespace, SuffixTree] = {}
        self._outputs: deque[_Output] = deque()  # oldest first
        self._pending: deque[_Output] = deque()  # the newest of them: not in their trees yet, or in part
        self._leaving: deque[_Output] = deque()  # no longer of them: still in their trees, in part

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees: their memory is proportional to it."""
        return sum(tree.num_nodes for tree in self._trees.values())

    def tree(self, namespace: Namespace) -> SuffixTree | None:
        """Tree of the outputs of this namespace's requests."""
        return self._trees.get(namespace)

    def add(self, namespace: Namespace, tokens: list[int]) -> None:
        """Remember an output; `update_trees` puts it into a tree."""
        tokens = tokens[-self._max_tokens :]
        if self._max_outputs == 0 or len(tokens) < 2:  # one token follows nothing
            return
        output = _Output(namespace, tokens)
        self._outputs.append(output)
        self._pending.append(output)
        self.num_tokens += len(tokens)
        while len(self._outputs) > self._max_outputs or self.num_tokens > self._max_tokens:
            self._drop(self._outputs.popleft())

    def update_trees(self, budget: int) -> int:
        """Remove old outputs from the trees and add new ones, `budget` tokens in all; returns the rest of the
        budget."""
        while self._leaving and budget > 0:
            output = self._leaving[0]
            tree, before = self._trees[output.namespace], output.num_counted
            tree.remove(output, budget)
            budget -= before - output.num_counted
            if output.num_counted == 0:
                self._leaving.popleft()
                if tree.num_nodes == 0:
                    del self._trees[output.namespace]
        while self._pending and budget > 0:
            self.version += 1
            output = self._pending[0]
            tree = self._trees.setdefault(output.namespace, SuffixTree(self._depth))
            before = output.num_counted
            tree.insert(output, budget)
            budget -= output.num_counted - before
            if output.num_counted == len(output.tokens):
                self._pending.popleft()
        return budget

    def forget_adapter(self, digest: bytes) -> None:
        """Drop all stores of an adapter's content."""
        for namespace in [namespace for namespace in self._trees if namespace[1] == digest]:
            del self._trees[namespace]
        for output in self._outputs:
            if output.namespace[1] == digest:
                self.num_tokens -= len(output.tokens)
        self._outputs, self._pending, self._leaving = (
            deque(output for output in queue if output.namespace[1] != digest)
            for queue in (self._outputs, self._pending, self._leaving)
        )

    def _drop(self, output: _Output) -> None:
        self.num_tokens -= len(output.tokens)
        if self._pending and self._pending[0] is output:  # outputs are recorded in their order
            self._pending.popleft()
        if output.num_counted:
            self._leaving.append(output)


class _RunningRequest:
    """A running request's own tree, and its last match in its namespace's."""

    __slots__ = ("base", "depth", "matched", "past", "remembered", "request", "text", "tree")

    def __init__(self, request: Request, depth: int) -> None:
        self.request = request
        self.depth = depth
        self.base = 0
        """Index of the request's first token that is in the tree."""
        self.matched = 0
        """Length of the longest suffix that also occurs earlier."""
        self.past = (-1, 0, 0)
        """Version of the stores, number of tokens and length of the longest suffix known there, when last looked."""
        self.remembered = True
        """True when its output enters a store."""
        self.restart(0)

    def restart(self, base: int) -> None:
        """Start again with the tokens from `base` on."""
        self.base, self.matched = base, 0
        self.tree, self.text = SuffixTree(self.depth), Text([])

    def update(self, tokens: Sequence[int], budget: int) -> int:
        """Add the tokens since the last call to the tree, at most `budget`; returns the rest of the budget."""
        if len(tokens) - self.base > MAX_OWN_TOKENS:
            self.restart(len(tokens) - MAX_OWN_TOKENS // 2)
        known = self.base + len(self.text.tokens)
        if known < len(tokens) and budget > 0:
            self.text.tokens += tokens[known : known + budget]
            self.matched = self.tree.extend(self.text)
        return budget - (self.base + len(self.text.tokens) - known)

    def past_place(self, stores: OutputStores, tree: SuffixTree, tokens: Sequence[int], longest: int) -> Place | None:
        """The longest suffix of `tokens` in `tree`, of at most `longest` tokens. In an unchanged tree it has grown by
        the new tokens at most."""
        version, num_tokens, length = self.past
        if version == stores.version:
            longest = min(longest, length + len(tokens) - num_tokens)
        place = longest_suffix(tree, tokens, longest)
        self.past = (stores.version, len(tokens), 0 if place is None else place.length)
        return place

    def place(self, num_tokens: int, longest: int) -> Place | None:
        """Match of the last tokens in the tree; None until it has all `num_tokens`."""
        tokens = self.text.tokens
        if self.base + len(tokens) < num_tokens:
            return None
        return self.tree.find(tokens, len(tokens) - min(self.matched, longest), len(tokens))


def load(config: SpeculativeConfig, context: DrafterContext) -> SuffixDrafter:
    """Build the drafter that `config` asks for; it loads nothing."""
    return SuffixDrafter(config)


class SuffixDrafter(Drafter):
    """Drafts the most frequent continuation of the longest context known. Owns no KV; drafts are certain.

    A tree lookup and the upkeep of the trees are plain Python: some 10 to 50 microseconds a row and step.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._longest = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_prob = config.suffix_decoding_min_token_prob
        self._depth = self._longest + config.num_speculative_tokens
        self._stores = OutputStores(self._depth, config.suffix_decoding_max_cached_requests)
        self._live: dict[str, _RunningRequest] = {}  # by request id

    @property
    def stores(self) -> OutputStores:
        """Outputs of past requests."""
        return self._stores

    def forget_adapter(self, digest: bytes) -> None:
        """Drop the stores of that content; outputs of running requests with it will not be stored."""
        self._stores.forget_adapter(digest)
        for live in self._live.values():
            if live.request.text_namespace[1] == digest:
                live.remembered = False

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Draft the most frequent continuation, from the tree with more expected accepted drafts."""
        self._remember_finished()
        spare = self._stores.update_trees(STEP_TOKENS)
        proposals = []
        for row in rows:
            drafts = NO_DRAFTS
            if _is_followed(row.request):
                live = self._live_of(row.request)
                new = 1 + row.num_accepted if row.sampled else 0  # the step's own tokens are always added
                spare = max(0, live.update(row.tokens, spare + new))
                if row.sampled and row.max_drafts > 0:
                    drafts = self._drafts(live, row)
            proposals.append(Proposal(drafts, len(row.tokens)))
        return proposals

    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Add past outputs to the trees; running requests catch up when they draft."""
        self._remember_finished()
        for row in rows:
            if _is_followed(row.request):
                self._live_of(row.request)
        self._stores.update_trees(STEP_TOKENS)

    def _live_of(self, request: Request) -> _RunningRequest:
        live = self._live.get(request.request_id)
        if live is None or live.request is not request:
            live = self._live[request.request_id] = _RunningRequest(request, self._depth)
        return live

    def _drafts(self, live: _RunningRequest, row: DraftRow) -> Drafts:
        own = self._continuation(live.tree, live.place(len(row.tokens), self._longest), row.max_drafts)
        tree = self._stores.tree(row.request.text_namespace)
        past = NOTHING
        if tree is not None:
            place = live.past_place(self._stores, tree, row.tokens, self._longest)
            past = self._continuation(tree, place, row.max_drafts)
        best = own if own.score >= past.score else past
        return Drafts(best.token_ids) if best.token_ids else NO_DRAFTS

    def _continuation(self, tree: SuffixTree, place: Place | None, max_drafts: int) -> Continuation:
        if place is None:
            return NOTHING
        limit = min(max_drafts, int(self._factor * place.length + 1e-6))  # 0.1 * 30 is a little less than 3
        return tree.continuation(place, limit, self._min_prob)

    def _remember_finished(self) -> None:
        finished = [key for key, live in self._live.items() if live.request.status is Status.FINISHED]
        for key in finished:
            live = self._live.pop(key)
            request = live.request
            if live.remembered:
                self._stores.add(request.text_namespace, request.tokens[request.num_prompt_tokens :])


def _is_followed(request: Request) -> bool:
    """True for a running request; one that is never drafted for costs nothing."""
    return request.params.max_drafts != 0 and request.status is not Status.FINISHED


def longest_suffix(tree: SuffixTree, tokens: Sequence[int], longest: int) -> Place | None:
    """The longest suffix of `tokens` that is in `tree`, of at most `longest` tokens."""
    last = tokens[max(0, len(tokens) - longest) :]
    for start in range(len(last)):
        place = tree.find(last, start, len(last))
        if place is not None:
            return place
    return None
