"""Sampling parameters that change single logits: masks, biases and penalties.

Each edit is a function of the request's parameters and its tokens, drafts before the row included, so that neither
preemption nor rejected drafts can make it stale: `Request.counts` and `EditState` only cache the processed accepted
tokens, which are never undone. All are vectorised over the rows that need them. Penalties are a kernel, so drafted and
sampled tokens can stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ....kernels.penalties import Penalised, penalise
from ....kernels.staging import to_device
from ....spec_decode.drafters.base import DraftRow
from ...core.request import Request
from ...core.sampling_params import SamplingParams
from .bad_words import BadWords
from .grammar_masks import mask_logits
from .thinking import Thinking, ThinkingRule

NEGATIVE_INFINITY = float("-inf")


class Seen(NamedTuple):
    """A sequence's tokens, read when a step is launched: they may grow while it runs."""

    entries: np.ndarray
    """[E], see `Penalised.entries`."""
    on_device: tuple[Sequence[int], ...] = ()
    """Tokens after these that only the device knows; -1: none."""

    def after(self, tokens: Sequence[int]) -> Seen:
        """Return these tokens followed by `tokens`, which are on the device."""
        return self._replace(on_device=(*self.on_device, tokens))


class LogitsRow(NamedTuple):
    """One row of the logits: those of the request's next token after its tokens and `drafts`."""

    place: int
    """Row of the logits."""
    request: Request
    drafts: tuple[Sequence[int], ...]
    """The drafts before this row, in parts that may be only on the device; they count like generated tokens."""
    num_tokens: int | None = None
    """Sequence length including the token in flight; None: len(request.tokens)."""
    seen: Seen | None = None
    """Its tokens, for penalties; None: those that it has."""
    is_draft: bool = False
    """True for a drafter's logits."""

    @property
    def num_drafts(self) -> int:
        """Number of drafts before this row."""
        return sum(map(len, self.drafts))

    @property
    def num_outputs(self) -> int:
        """Number of generated tokens that this row continues."""
        num_tokens = len(self.request.tokens) if self.num_tokens is None else self.num_tokens
        return num_tokens - self.request.num_prompt_tokens + self.num_drafts


_TABLED = (
    *("allowed_token_ids", "stop_token_ids", "logit_bias", "bad_words_token_ids", "thinking_token_budget"),
    *("thinking_start_token_ids", "thinking_end_token_ids"),
)
"""Parameters that the tables are made from."""


class EditTables:
    """A request's parameters in the form that steps use: made once, shared by the request's sequences."""

    def __init__(self, request: Request) -> None:
        params = self._params = request.params
        self._eos_token_ids = request.eos_token_ids
        self.allowed = _tokens(params.allowed_token_ids)
        self.ends = _tokens([*request.eos_token_ids, *request.sampling.stop_ids])
        self.biased = _tokens(params.logit_bias)
        self.biases = np.array([*(params.logit_bias or {}).values()], np.float32)
        self.words = BadWords(params.bad_words_token_ids)
        self.thinking = ThinkingRule.read(params)

    def fits(self, request: Request) -> bool:
        """True when these are the tables of another sequence, too."""
        mine, its = self._params, request.params
        return self._eos_token_ids == request.eos_token_ids and all(
            getattr(mine, name) == getattr(its, name) for name in _TABLED
        )


def _tokens(token_ids: Collection[int] | None) -> np.ndarray:
    return np.fromiter(token_ids or (), np.int64, len(token_ids or ()))


class EditState:
    """State of one sequence's edits between steps."""

    def __init__(self, tables: EditTables, request: Request) -> None:
        self.tables = tables
        self.thinking = None if tables.thinking is None else Thinking(tables.thinking, request)
        """Bounded reasoning; None: it has no bound."""
        self._num_seen = 0  # generated tokens
        self._word_state = 0  # after these

    def banned_by_words(self, row: LogitsRow) -> np.ndarray:
        """Tokens that would complete a bad word."""
        words, request = self.tables.words, row.request
        if (
            not request.sampling.reads_tokens
        ):  # drafts may still be on the device: only words of several tokens make the host wait
            return words.banned(0)
        new = request.tokens[request.num_prompt_tokens + self._num_seen :]
        self._word_state = words.advance(self._word_state, new)
        self._num_seen += len(new)
        return words.banned(words.advance(self._word_state, chain.from_iterable(row.drafts)))


def edit_state(request: Request, tables: EditTables | None = None) -> EditState:
    """The request's state. `tables`: of another sequence, shared if it is of the same request."""
    if request.edit_state is None:
        shared = tables is not None and tables.fits(request)
        own = tables if tables is not None and shared else EditTables(request)
        request.edit_state = EditState(own, request)
    state: EditState = request.edit_state
    return state


@dataclass(frozen=True, slots=True)
class Edit:
    """One kind of edit: whether a request needs it, and its effect on those rows (in place)."""

    wanted: Callable[[SamplingParams], bool]
    apply: Callable[[Tensor, Sequence[LogitsRow]], None]


def apply_edits(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Edit `logits` [R, V] (float32) in place, in vLLM's order: grammar, allowed tokens, bad words, minimum
    length, bias, penalties; then the end of reasoning."""
    for edit in EDITS:
        chosen = [row for row in rows if edit.wanted(row.request.params)]
        if chosen:
            edit.apply(logits, chosen)


def edit_draft_logits(logits: Tensor, rows: Sequence[tuple[DraftRow, tuple[Sequence[int], ...]]]) -> None:
    """`apply_edits` for drafters: logits [B, V] after each row's request's tokens and those given with it."""
    subjects = [
        LogitsRow(i, row.request, drafts, None, row.seen, is_draft=True) for i, (row, drafts) in enumerate(rows)
    ]
    apply_edits(logits, subjects)


def _flat(logits: Tensor, pairs: Sequence[tuple[LogitsRow, np.ndarray]]) -> Tensor:
    """Indices into `logits.view(-1)` of these tokens of these rows. Tokens are below V: admission checks it."""
    width = logits.shape[1]
    parts = [tokens + row.place * width for row, tokens in pairs]
    return to_device(np.concatenate(parts), logits.device)


def _ban(logits: Tensor, pairs: Sequence[tuple[LogitsRow, np.ndarray]]) -> None:
    if any(len(tokens) for _, tokens in pairs):
        logits.view(-1)[_flat(logits, pairs)] = NEGATIVE_INFINITY


def _allow_only(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    where = _flat(logits, [(row, edit_state(row.request).tables.allowed) for row in rows])
    kept = logits.view(-1)[where]
    logits[to_device(np.array([row.place for row in rows]), logits.device)] = NEGATIVE_INFINITY
    logits.view(-1)[where] = kept


def _bad_words(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    _ban(logits, [(row, edit_state(row.request).banned_by_words(row)) for row in rows])


def _min_tokens(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """No end-of-sequence and no stop token before `min_tokens` tokens."""
    short = [row for row in rows if row.num_outputs < row.request.params.min_tokens]
    _ban(logits, [(row, edit_state(row.request).tables.ends) for row in short])


def _logit_bias(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    tables = [edit_state(row.request).tables for row in rows]
    where = _flat(logits, [(row, own.biased) for row, own in zip(rows, tables, strict=True)])
    logits.view(-1)[where] += to_device(np.concatenate([own.biases for own in tables]), logits.device)


def token_entries(request: Request) -> np.ndarray:
    """[E] int64, a copy: the counts of all tokens that the host knows, see `TokenCounts.entries`."""
    request.counts.count(request.tokens, request.num_prompt_tokens)
    return np.frombuffer(request.counts.entries, dtype=np.int64).copy()


def _penalties(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    of_requests: dict[int, list[LogitsRow]] = {}
    for row in rows:
        of_requests.setdefault(id(row.request), []).append(row)
    sequences = []
    for own in of_requests.values():
        last = max(own, key=lambda row: row.num_drafts)
        params = last.request.params
        seen = Seen(token_entries(last.request)) if last.seen is None else last.seen
        sequences.append(
            Penalised(
                places=[row.place for row in own],
                num_after=[sum(map(len, seen.on_device)) + row.num_drafts for row in own],
                entries=seen.entries,
                after=(*seen.on_device, *last.drafts),
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )
        )
    penalise(logits, sequences)


def _end_thinking(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Only the next token of the end mark, when the tokens of reasoning are used up. A token that another edit has
    excluded is not forced: then the reasoning continues."""
    pairs = [(row.place, _forced_end(row)) for row in rows]
    forced = [(place, token) for place, token in pairs if token is not None]
    if not forced:
        return
    table = to_device(np.array(forced, np.int64), logits.device)
    places, tokens = table[:, 0], table[:, 1:]
    part = logits[places]
    kept = part.gather(1, tokens)
    part.masked_fill_(kept > NEGATIVE_INFINITY, NEGATIVE_INFINITY).scatter_(1, tokens, kept)
    logits[places] = part


def _forced_end(row: LogitsRow) -> int | None:
    thinking = edit_state(row.request).thinking
    assert thinking is not None, "only rows with a bound are edited"
    return thinking.forced_after(row.request, row.drafts)


EDITS: tuple[Edit, ...] = (
    Edit(lambda p: p.structured_outputs is not None, mask_logits),
    Edit(lambda p: p.allowed_token_ids is not None, _allow_only),
    Edit(lambda p: bool(p.bad_words_token_ids), _bad_words),
    Edit(lambda p: p.min_tokens > 0, _min_tokens),
    Edit(lambda p: bool(p.logit_bias), _logit_bias),
    Edit(lambda p: p.penalises, _penalties),
    Edit(lambda p: p.thinking_token_budget is not None, _end_thinking),
)
