"""Grammars of requests with structured outputs: token masks for each row of the logits, and tokens without a choice.

A grammar is compiled in a thread, while steps go on, when its first request is about to be admitted; the request waits
for it. A sequence follows its grammar by its own tokens alone, as all edits of logits do: drafts before a row are tried
and taken back, so that neither preemption nor rejected drafts make it stale.

R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.staging import to_device
from ...core.errors import InvalidRequestError, OutriderError
from ...core.request import Drafts, Request
from ...core.structured_outputs import StructuredOutputsParams, on_deep_stack, parser_limits
from ..queue.gates import Gate

if TYPE_CHECKING:
    from .logits_edits import LogitsRow

MAX_KEPT = 64
"""Compiled grammars that are kept for the next requests; one takes about 1 MB, and a complex one 50 MB."""
MAX_FORCED = 32
"""Most tokens without a choice that are proposed at once."""


class GrammarState:
    """Place of one sequence in its grammar, after the tokens that it has."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_seen = 0  # generated tokens
        self._is_lost = False  # a token did not fit: then there is no mask any more

    def fill(self, rows: Sequence[LogitsRow], masks: np.ndarray) -> None:
        """Write the masks of a sequence's rows, by ascending number of drafts, into `masks` [R, ceil(V / 8)] uint8: the
        bit of each allowed token. Rows behind a draft that does not fit are left: none of them is reached."""
        self._advance(rows[0].request)
        taken = consumed = 0
        for row, mask in zip(rows, masks, strict=True):
            drafts = list(chain.from_iterable(row.drafts))
            fitting = drafts[taken:]
            count = self._matcher.try_consume_tokens(fitting) if fitting and not self._is_lost else 0
            taken, consumed = taken + count, consumed + count
            # Behind the end only the token of the end is offered, again and again: it is sampled with `ignore_eos`.
            if count < len(fitting) and not self._matcher.is_stopped():
                break
            if self._is_lost:
                mask[:] = 0
            else:
                allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(mask)]
                mask[:] = 0
                mask[: len(allowed)] = allowed
                if self._matcher.is_error():
                    mask[:] = 0
        if consumed:
            self._matcher.rollback(consumed)

    def forced(self, request: Request) -> list[int]:
        """Tokens that follow for sure, or nearly so: the text is sure, and these are its usual tokens."""
        self._advance(request)
        if self._is_lost or self._matcher.is_error():
            return []
        found: list[int] = self._matcher.compute_ff_tokens()
        return found[:MAX_FORCED]

    def _advance(self, request: Request) -> None:
        new = request.tokens[request.num_prompt_tokens + self._num_seen :]
        self._num_seen += len(new)
        if new and not self._is_lost:
            # After its end a grammar takes no token, and offers that of the end again.
            self._is_lost = self._matcher.try_consume_tokens(new) < len(new) and not self._matcher.is_stopped()


class Grammars(Gate):
    """Compiled grammars of an engine. A sequence with structured outputs is admitted once its grammar is there."""

    def __init__(self, load_tokenizer: Callable[[], Any], vocab_size: int) -> None:
        """`load_tokenizer`: called in a thread, when the first grammar is wanted."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._vocabularies: dict[frozenset[int], Any] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[tuple[Any, ...], Future[Any]] = OrderedDict()

    def admit(self, request: Request) -> str | None:
        """See the class. InvalidRequestError: the grammar cannot be compiled."""
        wanted = request.params.structured_outputs
        if wanted is None or request.grammar is not None:
            return None
        key = (request.eos_token_ids, wanted.key)
        job = self._compiled.get(key)
        if job is None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "grammars")
            job = self._compiled[key] = self._threads.submit(self._compile, wanted, request.eos_token_ids)
            for old in [old for old, done in self._compiled.items() if done.done()][: -MAX_KEPT or None]:
                del self._compiled[old]
        self._compiled.move_to_end(key)
        if not job.done():
            return "grammar"
        request.grammar = GrammarState(job.result().deep_copy())
        return None

    def prefetch(self, request: Request) -> None:
        """Begin to compile."""
        if request.params.structured_outputs is not None and request.grammar is None:
            try:
                self.admit(request)
            except InvalidRequestError:
                return  # told when the request is admitted

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a grammar; False when none is being compiled."""
        job = next((job for job in self._compiled.values() if not job.done()), None)
        if job is None:
            return False
        try:
            job.exception(timeout)
        except TimeoutError:
            return True
        return True

    def close(self) -> None:
        """Stop the thread after the grammar under way."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, wanted: StructuredOutputsParams, eos_token_ids: frozenset[int]) -> Any:
        text = wanted.grammar_text()
        from llguidance import LLMatcher

        try:
            vocabulary = self._vocabulary(eos_token_ids)
        except OutriderError:
            raise
        except Exception as error:  # the package says so in many ways, and a step that raises ends the engine
            raise InvalidRequestError(
                f"structured_outputs are not served with this model's tokenizer: {error}", param="structured_outputs"
            ) from error
        matcher = on_deep_stack(
            lambda: LLMatcher(vocabulary, text, log_level=0, limits=parser_limits()), source=wanted.source
        )
        if matcher.is_error():
            problem = matcher.get_error().splitlines()[0][:500]
            raise InvalidRequestError(f"{wanted.source}: {problem}", param=wanted.source)
        return matcher

    def _vocabulary(self, eos_token_ids: frozenset[int]) -> Any:
        found = self._vocabularies.get(eos_token_ids)
        if found is None:
            found = self._vocabularies[eos_token_ids] = _vocabulary(
                self._load_tokenizer(), self._vocab_size, sorted(eos_token_ids)
            )
        return found


def _vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """Vocabulary in the package's form. Takes 1 s for 50,000 tokens."""
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InvalidRequestError(
            f"structured_outputs need a tokenizer of the library tokenizers; this one is {type(tokenizer).__name__}",
            param="structured_outputs",
        )
    return from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), eos_token_ids or None)


def mask_logits(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Set the logits of tokens that do not fit to -inf, in place, in these rows of `logits` [R, V]."""
    of_requests: dict[int, list[LogitsRow]] = {}
    for row in rows:
        of_requests.setdefault(id(row.request), []).append(row)
    masks = np.full((len(rows), -(-logits.shape[1] // 8)), 255, np.uint8)
    places: list[int] = []
    for own in of_requests.values():
        own.sort(key=lambda row: row.num_drafts)
        own[0].request.grammar.fill(own, masks[len(places) : len(places) + len(own)])
        places += [row.place for row in own]
    if logits.device.type == "cpu":
        for place, mask in zip(places, masks, strict=True):
            _mask_row(logits[place], mask)
        return
    packed = torch.from_numpy(masks).to(logits.device)
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    index = to_device(np.array(places), logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, float("-inf"))


_LIMITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_LIMITS = _LIMITS.astype(np.float32)
"""Largest logits [256, 8] of the tokens of a mask's byte."""


def _mask_row(logits: Tensor, mask: np.ndarray) -> None:
    """Set the logits [V] float32 of tokens that do not fit to -inf, in place."""
    values = logits.numpy()
    np.minimum(values, _LIMITS.take(mask, axis=0).reshape(-1)[: len(values)], out=values)


def with_forced(request: Request, drafts: Drafts) -> Drafts:
    """Drafts for a sequence that follows a grammar: those of the drafter, or the tokens without a choice, where the
    drafter has not proposed just these."""
    if request.grammar is None or request.params.max_drafts == 0:
        return drafts
    forced: list[int] = request.grammar.forced(request)
    if not forced or list(drafts.token_ids[: len(forced)]) == forced:
        return drafts
    return Drafts(forced, forced=True)
