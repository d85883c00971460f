"""State of one sequence in its grammar: token masks of its next steps, and tokens without a choice.

The state depends on the sequence's own tokens alone, as all edits of logits do: drafts before a row are tried and
undone, so neither preemption nor rejected drafts make it stale. Everything here may take long, and is called by the
threads of `mask_threads.py`, one at a time for each sequence.

V vocabulary. A mask is [ceil(V / 8)] uint8, a bit for each token that may come next.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .compiled_grammar import CompiledGrammar
from .list_end import ListProgress
from .mask_threads import MaskThreads, consume_without_gil

MAX_FORCED = 32
"""Most tokens without a choice that are proposed at once."""
_MAX_SPELLINGS = 64
"""Most tokens that may come next if the text has no choice: the prefixes of that text which are tokens."""
_WINDOW_BYTES = 16
"""Length of the forced text that is tokenized to choose its first token: a word or two."""
_FULL = "too many states"
"""Part of the package's error when a lexer has `max_lexer_states` states."""
_MAX_RENEWALS = 256
"""Most times that a sequence finds a lexer full; a text of letters in all languages fills one in some 70 tokens."""


class GrammarState:
    """One sequence's state. No two threads call it at once: see `is_busy`."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        end_token_ids: frozenset[int],
        threads: MaskThreads,
        most_of_list: int | None = None,
    ) -> None:
        """Start at the grammar's start.

        Args:
            end_token_ids: Tokens that end the answer.
            threads: Threads of the engine.
            most_of_list: Most tokens of the answer if it is a list that must not be cut off.
        """
        self.threads = threads
        self.is_busy = False
        """True while a thread works on it, under the grammar's lock."""
        self.is_deferred = False
        """True when its mask was not ready for the last step: it got no token in that step, which is repeated."""
        self.num_deferred = 0
        """Number of consecutive steps without a token."""
        self.seconds = 0.0
        """Time that its last mask took."""
        self.grammar = grammar
        self._ends = end_token_ids
        self._matcher = grammar.start()
        self._kept = None if grammar.can_roll_back else grammar.start()  # after `_tokens`, if that can't be undone
        self._most_of_list = most_of_list
        self._list = ListProgress()  # of `_tokens`
        self._tokens: list[int] = []  # generated ones that it has followed
        self._ahead: list[int] = []  # drafts after these that `_matcher` has consumed
        self._masks: dict[tuple[int, ...], np.ndarray] = {}  # by the drafts after `_tokens`
        self._plain: dict[tuple[int, ...], np.ndarray] = {}  # before tokens are chosen if the text has no choice
        self._steps: dict[bytes, int | None] = {}  # by the text after `_tokens`: the least token that is sure to follow
        self._num_renewals = grammar.num_renewals
        self._num_rebuilt = 0
        self._problem = ""

    @property
    def problem(self) -> str:
        """Reason why there is no mask; "": a token did not fit, or there is one."""
        return self.grammar.problem or self._problem

    def fail(self, problem: str) -> None:
        """Allow no more tokens."""
        self._problem = self._problem or problem

    def masks(self, tokens: Sequence[int], drafts: Sequence[int]) -> list[np.ndarray]:
        """Masks that are ready: after `tokens`, the generated ones, and after each of the first drafts after them."""
        if len(tokens) != len(self._tokens):
            return []
        found = []
        for count in range(len(drafts) + 1):
            mask = self._masks.get(tuple(drafts[:count]))
            if mask is None:
                break
            found.append(mask)
        return found

    def fill(self, tokens: Sequence[int], drafts: Sequence[int], deadline: float) -> None:
        """Make the masks after `tokens`, the generated ones, and after each of `drafts`. Rows after a draft that does
        not fit, after the end or after the `deadline` (`time.perf_counter`) have none."""
        self._advance(tokens)
        for count in range(len(drafts) + 1):
            if count and time.perf_counter() > deadline:
                return
            prefix = tuple(drafts[:count])
            if prefix not in self._masks:
                if count and not _allows(self._masks[prefix[:-1]], prefix[-1]):
                    return
                self._masks[prefix] = self._mask(prefix)

    def forced(self, tokens: Sequence[int], most: int, deadline: float) -> list[int]:
        """The only tokens that may follow `tokens`, one after the other, but for an end; at most `most`."""
        self._advance(tokens)
        found: list[int] = []
        while len(found) < most and time.perf_counter() < deadline:
            prefix = tuple(found)
            if prefix not in self._masks:
                self._masks[prefix] = self._mask(prefix)
            only = _members(self._masks[prefix], 1)
            if not only or only[0] in self._ends:
                break
            found += only
        return found

    # ------------------------------------------------------------------- masks

    def _mask(self, drafts: tuple[int, ...]) -> np.ndarray:
        """Mask after `drafts`. Forced text is written in the tokenizer's own tokens: others confuse models. It depends
        only on the tokens before it, not on drafts that were tried."""
        mask = self._plain_mask(drafts)
        if self._most_of_list is not None:
            mask = self._list_ended(mask, drafts)
        if not self.grammar.can_roll_back:
            return mask
        longest = max((len(self.grammar.vocabulary.text(token)) for token in _members(mask, _MAX_SPELLINGS)), default=0)
        text = self._sure_text(drafts, max(longest, _WINDOW_BYTES)) if longest else b""
        # A token that continues after that text leaves a choice: " -" or " ", before a number.
        if text and longest <= len(text):
            first = self._usual(drafts, text)
            if first is not None and _allows(mask, first):
                mask = np.zeros_like(mask)
                mask[first >> 3] = 1 << (first & 7)
        return mask

    def _list_ended(self, mask: np.ndarray, drafts: tuple[int, ...]) -> np.ndarray:
        """The mask without the tokens that begin a next item of the list, if the tokens left cannot hold one."""
        num_tokens = len(self._tokens) + len(drafts)
        num_left = self._most_of_list - num_tokens if self._most_of_list is not None else 2 * num_tokens
        if num_left >= 2 * num_tokens:  # no item is as long
            return mask
        vocabulary = self.grammar.vocabulary
        separators = vocabulary.separators
        separators = separators[mask[separators >> 3] >> (separators & 7) & 1 > 0]
        if not len(separators):
            return mask
        progress = copy.copy(self._list)
        for token in drafts:
            progress.feed(vocabulary.text(token))
        excess = progress.excess(((token, vocabulary.text(token)) for token in separators.tolist()), num_left)
        if excess:
            ended = mask.copy()
            for token in excess:
                ended[token >> 3] &= ~(1 << (token & 7)) & 255
            mask = ended if ended.any() else mask
        return mask

    def _sure_text(self, drafts: tuple[int, ...], num_bytes: int) -> bytes:
        """Text that must follow `drafts`, at least `num_bytes` of it if it is as long."""
        text_of = self.grammar.vocabulary.text
        before, path = b"".join(map(text_of, drafts)), list(drafts)
        text = b""
        while len(text) < num_bytes:
            prefix = before + text
            if prefix not in self._steps:
                self._steps[prefix] = self._least_token(self._plain_mask(tuple(path)))
            token = self._steps[prefix]
            if token is None:
                break
            path.append(token)
            text += text_of(token)
        return text

    def _plain_mask(self, drafts: tuple[int, ...]) -> np.ndarray:
        """Mask of all tokens that fit after `drafts`; nothing is allowed after an error."""
        mask = self._plain.get(drafts)
        if mask is not None:
            return mask
        packed = b""
        if self._move(drafts) or self._has_ended():  # after the end the end may come again
            packed = self._call(lambda: self._matcher.compute_bitmask())
        vocabulary = self.grammar.vocabulary
        if self._failed() or not packed:
            return np.zeros(-(-vocabulary.tokenizer.vocab_size // 8), np.uint8)
        mask = np.frombuffer(packed, np.uint8).copy()
        if _allows(mask, vocabulary.end):
            mask[vocabulary.end >> 3] &= ~(1 << (vocabulary.end & 7)) & 255
            for token in self._ends:
                if token >> 3 < len(mask):  # a tokenizer may name end tokens that the model does not have
                    mask[token >> 3] |= 1 << (token & 7)
        self._plain[drafts] = mask
        return mask

    def _least_token(self, mask: np.ndarray) -> int | None:
        """The shortest of the tokens that may come next, if all others begin with it."""
        allowed = _members(mask, _MAX_SPELLINGS)
        if not allowed or self._ends.intersection(allowed):
            return None
        texts = {token: self.grammar.vocabulary.text(token) for token in allowed}
        least = min(texts, key=lambda token: len(texts[token]))
        return least if texts[least] and all(text.startswith(texts[least]) for text in texts.values()) else None

    def _usual(self, drafts: tuple[int, ...], text: bytes) -> int | None:
        """First of the tokens as which the tokenizer writes `text` after the last token; None: it writes another text,
        or the text has special tokens."""
        vocabulary = self.grammar.vocabulary
        before = [*(drafts or self._tokens)[-1:]]
        context = vocabulary.text(before[0]) if before else b""
        if b"\xff" in text:
            return None
        usual: list[int] = [] if b"\xff" in context else vocabulary.tokenizer.tokenize_bytes(context + text)
        if before and usual[:1] == before:
            return usual[1] if len(usual) > 1 else None
        usual = vocabulary.tokenizer.tokenize_bytes(text)
        return usual[0] if usual else None

    # ---------------------------------------------------------------- position

    def _advance(self, tokens: Sequence[int]) -> None:
        """Follow the generated `tokens`."""
        new = list(tokens[len(self._tokens) :])
        if not new:
            return
        count = len(new)
        fits = self._ahead[:count] == new or self._move(new)
        self._ahead = self._ahead[count:]
        for masks in (self._masks, self._plain):
            kept = {drafts[count:]: mask for drafts, mask in masks.items() if list(drafts[:count]) == new}
            masks.clear()
            masks.update(kept)
        texts = [*map(self.grammar.vocabulary.text, new)]
        if self._most_of_list is not None:
            for each in texts:
                self._list.feed(each)
        text = b"".join(texts)
        self._steps = {at[len(text) :]: step for at, step in self._steps.items() if at.startswith(text)}
        self._tokens += new
        if self._kept is not None:
            for token in new:
                self._consume_with(self._kept, token)
        if not (fits or self._failed() or self._has_ended()):
            self.fail("a token did not fit the grammar")

    def _move(self, drafts: Sequence[int]) -> bool:
        """Put the matcher after `drafts`; False if one of them does not fit, or comes after the end."""
        same = 0
        while same < len(self._ahead) and same < len(drafts) and self._ahead[same] == drafts[same]:
            same += 1
        if same < len(self._ahead):
            self._take_back(len(self._ahead) - same)
        for token in drafts[len(self._ahead) :]:
            if self._failed() or not self._call(partial(self._consume, token)):
                return False
            self._ahead.append(token)
        return not self._failed()

    def _take_back(self, count: int) -> None:
        """Undo the last `count` drafts, or more if the grammar cannot undo single ones."""
        if self._kept is None:
            self._matcher.rollback(count)
            del self._ahead[len(self._ahead) - count :]
        else:
            self._matcher = self._kept.deep_copy()
            self._ahead.clear()

    def _consume(self, token: int) -> bool:
        mask = self._plain.get(tuple(self._ahead))  # a token that does not fit would be an error in some grammars
        return (mask is None or _allows(mask, token)) and self._consume_with(self._matcher, token)

    def _consume_with(self, matcher: Any, token: int) -> bool:
        """Consume one token; False if it does not fit: then nothing has changed."""
        if matcher.is_stopped():
            return False
        if token in self._ends and matcher.is_accepting():
            token = self.grammar.vocabulary.end
        if self.grammar.is_lexical:
            return bool(matcher.try_consume_tokens([token]))
        return consume_without_gil(matcher, token)

    def _call(self, work: Callable[[], Any]) -> Any:
        """Result of a call to the matcher; again with an empty lexer if it is full."""
        if self._num_renewals != self.grammar.num_renewals:
            self._rebuild()
        result = self._timed(work)
        # A full lexer is an error of a mask, and refuses tokens without one.
        is_full = self._matcher.is_error() and _FULL in self._matcher.get_error()
        if is_full or (result is False and not self._matcher.is_stopped()):
            self._num_rebuilt += 1
            if self._num_rebuilt > _MAX_RENEWALS:
                self.fail("the grammar is too complex: its lexer becomes full again and again")
                return result
            if self._num_renewals == self.grammar.num_renewals:
                self.grammar.renew()
            self._rebuild()
            result = self._timed(work)
        return result

    def _rebuild(self) -> None:
        """Follow all tokens again with the grammar's present lexer."""
        self._num_renewals = self.grammar.num_renewals
        self._matcher = self.grammar.start()
        self._follow(self._tokens)
        if self._kept is not None:
            self._kept = self._matcher.deep_copy()
        self._follow(self._ahead)

    def _follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._consume_with(self._matcher, token):
                return

    def _timed(self, work: Callable[[], Any]) -> Any:
        began, computed = time.perf_counter(), time.process_time()
        result = work()
        seconds = time.perf_counter() - began
        self.seconds = max(seconds, 0.9 * self.seconds)
        self.grammar.charge(min(seconds, time.process_time() - computed))  # a busy machine is not the grammar's fault
        return result

    def _has_ended(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _failed(self) -> bool:
        """True when there are no masks any more."""
        if not self._problem and self._matcher.is_error():
            self.fail(f"the grammar is too complex at this point: {self._matcher.get_error().splitlines()[0][:200]}")
        return bool(self.problem)


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _members(mask: np.ndarray, most: int) -> list[int]:
    """Tokens of a mask, if there are at most `most`."""
    if int.from_bytes(mask.tobytes(), "little").bit_count() > most:
        return []
    indices = np.flatnonzero(mask)
    byte, bit = np.nonzero(np.unpackbits(mask[indices], bitorder="little").reshape(-1, 8))
    found: list[int] = (indices[byte] * 8 + bit).tolist()
    return found
