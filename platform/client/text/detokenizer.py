"""Token ids to text, one token at a time: never half a character, and stop strings that do not depend on the chunks.

Text is looked at after every single token, so however many tokens a step brings (speculation brings several), the same
tokens give the same text and the same stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any, NamedTuple

from ...core.sampling_params import SamplingParams
from .stop_strings import StopSearch, stop_automaton
from .vocabulary import read_vocabulary

REPLACEMENT = "\ufffd"
"""The replacement character, to which incomplete UTF-8 decodes; the next token may complete the character."""

PROMPT_TAIL = 8
"""Prompt tokens that give the first output token its context: SentencePiece drops a space at the start of a text."""


class TokenDecoder:
    """Decodes one sequence, by the difference of two short decodes.

    `context` are the tokens of the last text that was given out, `held` the tokens since: new text is what decoding
    `context + held` has beyond decoding `context`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_tail: list[int],
        unspaced: Mapping[int, str] = MappingProxyType({}),
        alone: dict[int, str] | None = None,
    ) -> None:
        """`unspaced` are special tokens that get no space between them when they follow each other. `alone` is filled
        with what `decode` gives for one token."""
        self._decode = decode
        self._alone = {} if alone is None else alone
        self._context = prompt_tail
        self._held: list[int] = []
        self._before = decode(prompt_tail) if prompt_tail else ""
        if self._before.endswith(REPLACEMENT):  # a prompt cut inside a character is no context
            self._context, self._before = [], ""
        self.has_text_before = bool(self._before)
        """True if the first token is inside a text."""
        self._unspaced = unspaced
        self._after_special = False

    def step(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._held.append(token_id)
        after = self._decode(self._context + self._held)
        text = ""
        if len(after) > len(self._before) and not after.endswith(REPLACEMENT):
            text = self._new_in(after)
            self._context, self._held = self._held, []
            self._before = self._text_before()
        content = self._unspaced.get(token_id)
        if content is not None and self._after_special and text.strip() == content.strip():
            text = content
        self._after_special = content is not None
        return text

    def _text_before(self) -> str:
        """The context's text. Mostly it is one token, and the same ones come again and again."""
        if len(self._context) > 1:
            return self._decode(self._context)
        text = self._alone.get(self._context[0])
        if text is None:
            text = self._alone[self._context[0]] = self._decode(self._context)
        return text

    def flush(self) -> str:
        """The text still held back, U+FFFD for incomplete bytes as in `tokenizer.decode`."""
        return self._new_in(self._decode(self._context + self._held)) if self._held else ""

    def _new_in(self, after: str) -> str:
        """The text of the tokens held. If the text given out is no part of the whole any more, theirs alone.

        Byte fallback does this: a byte that is not UTF-8 turns the whole run of bytes before it into U+FFFD.
        """
        return after[len(self._before) :] if after.startswith(self._before) else self._decode(self._held)


def make_decoder(tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int]) -> TokenDecoder:
    """The decoder for one sequence."""
    tail = list(prompt_token_ids[-PROMPT_TAIL:])
    skip, spaces = params.skip_special_tokens, params.spaces_between_special_tokens
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        return TokenDecoder(lambda token_ids: tokenizer.decode(token_ids, **options), tail)
    unspaced: dict[int, str] = {}
    if not (skip or spaces):
        unspaced = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    alone = read_vocabulary(tokenizer).decoded[bool(skip)]
    return TokenDecoder(lambda token_ids: backend.decode(token_ids, skip_special_tokens=skip), tail, unspaced, alone)


class StopMatch(NamedTuple):
    """A stop string was found."""

    num_tokens: int
    """Tokens of the update up to and including the one that completed it."""
    stop: str


class IncrementalDetokenizer:
    """The text of one sequence so far, and the search for its stop strings.

    Stop strings are looked for in `text`, and in the whole text, which has the special tokens that `text` leaves out:
    these may be a stop string, or a part of one. The whole text begins to differ with the first such token.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self.text = ""
        self._decoder = make_decoder(tokenizer, params, prompt_token_ids)
        self._stops = StopSearch(stop_automaton(tuple(params.stop_strings))) if params.stop_strings else None
        self._left_out = read_vocabulary(tokenizer).specials if self._stops and params.skip_special_tokens else {}
        self._whole_stops: StopSearch | None = None
        """The search in the whole text; None while that is `text`."""
        self._num_whole = 0
        """Characters of the whole text, once there is a search in it."""
        self._gaps: list[tuple[int, int]] = []
        """Start and end of each special token in the whole text."""
        self._num_hidden = 0
        """Number of characters of all special tokens together."""
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._stopped = False

    @property
    def has_text_before(self) -> bool:
        """True if the first token is inside a text, the prompt's."""
        return self._decoder.has_text_before

    def update(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> StopMatch | None:
        """Append tokens to `text`, up to the one that completes a stop string.

        Args:
            ends_with_stop_token: the last of `token_ids` ended the sequence; its text is left out, unless the request
                wants stops in the output.
        """
        skipped = len(token_ids) - 1 if ends_with_stop_token and not self._include_stop else -1
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if index == skipped:
                break
            new = self._decoder.step(token_id)
            before = len(self.text)
            self._append(new)
            if self._stops is None:
                continue
            found = self._search(before, self._left_out.get(token_id, ""), new)
            if found is not None:
                end, start, stop = found
                self.text = self.text[: end if self._include_stop else start]
                self._stopped = True
                return StopMatch(index + 1, stop)
        return None

    def _append(self, new: str) -> None:
        # Python appends in place to a text without other references; else it would copy all of it for each token.
        text, self.text = self.text, ""
        text += new
        self.text = text

    def _search(self, before: int, left_out: str, new: str) -> tuple[int, int, str] | None:
        """(end, start, stop) of the stop string that a token completes first, as indices in `text`, which had `before`
        characters and got `new` ones; `left_out` is what the token adds to the whole text alone."""
        assert self._stops is not None
        if left_out:
            if self._whole_stops is None:
                self._whole_stops, self._num_whole = copy(self._stops), before
            self._gaps.append((self._num_whole, self._num_whole + len(left_out)))
            self._num_hidden += len(left_out)
        stops, matches = self._num_tokens > self._min_tokens, []
        found = self._stops.feed(new, stops=stops)
        if found is not None:
            end = before + found.end
            matches.append((end, end - len(found.stop), found.stop))
        if self._whole_stops is not None:
            added = left_out + new
            found = self._whole_stops.feed(added, stops=stops)
            if found is not None:
                end = self._num_whole + found.end
                matches.append((self._shown(end), self._shown(end - len(found.stop)), found.stop))
            self._num_whole += len(added)
        return min(matches, default=None)

    def _shown(self, position: int) -> int:
        """Index in `text` of an index of the whole text."""
        hidden = self._num_hidden
        for start, end in reversed(self._gaps):
            if end <= position:
                break
            hidden -= end - max(start, position)
        return position - hidden

    def finish(self) -> None:
        """No token will follow: append what was held back as incomplete, unless a stop string has cut the text."""
        if not self._stopped:
            self._append(self._decoder.flush())
            self._stopped = True

    def num_safe_chars(self) -> int:
        """Length of the prefix of `text` that no stop string can take back any more."""
        if self._stopped or self._include_stop or self._stops is None:
            return len(self.text)
        safe = len(self.text) - self._stops.num_held
        if self._whole_stops is not None:
            safe = min(safe, self._shown(self._num_whole - self._whole_stops.num_held))
        return safe
