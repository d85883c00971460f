"""Compiled grammars of requests with structured outputs, and the vocabulary that they are compiled for.

A grammar is compiled in a thread when its first request is about to be admitted: steps continue, and the request waits
for it. `grammar_state.py` follows it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import InvalidRequestError, OutriderError
from ...core.request import Request
from ...core.structured_outputs import StructuredOutputsParams, on_deep_stack, parser_limits
from ..queue.gates import Gate
from .compiled_grammar import CompiledGrammar, Vocabulary
from .grammar_state import GrammarState
from .mask_threads import MaskThreads

logger = logging.getLogger(__name__)

KEPT_BYTES = 64 << 20
"""Memory of compiled grammars that are kept for the next requests."""
_BASE_BYTES, _BYTES_PER_CHARACTER = 1 << 18, 512
"""Estimate of a compiled grammar's memory; of 14 forms of up to 65,536 characters each took less than 0.2 MB and 300
bytes a character."""
_FAILED_BYTES = 1 << 16
"""Most memory of a grammar that could not be compiled: its text, and its error."""
_END = "<|outrider's end of an answer|>"
"""Special token after the model's; it is only ever in masks, never in a text."""


class _Entry(NamedTuple):
    """A compiled grammar, or the reason why there is none."""

    grammar: CompiledGrammar | None
    error: OutriderError | None

    @property
    def num_bytes(self) -> int:
        """Estimate of its memory."""
        return _FAILED_BYTES if self.grammar is None else self.grammar.num_bytes


class Grammars(Gate):
    """Compiled grammars of an engine. A sequence with structured outputs is admitted once its grammar is compiled."""

    def __init__(self, load_tokenizer: Callable[[], Any], vocab_size: int) -> None:
        """`load_tokenizer`: called in a thread, when the first grammar is wanted."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._default_ends: frozenset[int] = frozenset()
        self._compiler: ThreadPoolExecutor | None = None
        self._masks: MaskThreads | None = None
        self._compiled: OrderedDict[tuple[Any, ...], Future[_Entry]] = OrderedDict()

    def prepare(self) -> None:
        """Make the vocabulary, which would delay other requests later: 0.5 s for 50,000 tokens. If that fails,
        requests with structured outputs get the reason."""
        if find_spec("llguidance") is not None:
            with suppress(OutriderError):
                self._load_vocabulary()

    def admit(self, request: Request) -> str | None:
        """See the class. InvalidRequestError: the grammar cannot be compiled."""
        wanted = request.params.structured_outputs
        if wanted is None or request.grammar is not None:
            return None
        job = self._job(wanted)
        if not job.done():
            return "grammar"
        entry = job.result()
        self._evict()
        if entry.error is not None:
            raise entry.error
        assert entry.grammar is not None
        assert self._masks is not None
        most = request.sampling.most_tokens - request.num_prompt_tokens if wanted.ends_list else None
        request.grammar = GrammarState(entry.grammar, request.eos_token_ids or self._default_ends, self._masks, most)
        return None

    def prefetch(self, request: Request) -> None:
        """Start to compile."""
        if request.params.structured_outputs is not None and request.grammar is None:
            self._job(request.params.structured_outputs)

    def _job(self, wanted: StructuredOutputsParams) -> Future[_Entry]:
        """The compiled grammar of a constraint; compiled now if there is none, or if the one there is unusable."""
        key = wanted.key
        job = self._compiled.get(key)
        if job is not None and job.done():
            grammar = job.result().grammar
            job = None if grammar is not None and grammar.problem else job
        if job is None:
            if self._compiler is None:
                self._compiler, self._masks = ThreadPoolExecutor(1, "grammars"), MaskThreads()
            job = self._compiled[key] = self._compiler.submit(self._entry, wanted)
        self._compiled.move_to_end(key)
        return job

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a grammar; False when none is being compiled."""
        job = next((job for job in self._compiled.values() if not job.done()), None)
        if job is None:
            return False
        with suppress(TimeoutError):
            job.result(timeout)
        return True

    def close(self) -> None:
        """Stop the threads after the grammars in progress."""
        if self._compiler is not None and self._masks is not None:
            self._compiler.shutdown(wait=False, cancel_futures=True)
            self._masks.close()

    @property
    def num_kept(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._compiled)

    @property
    def kept_bytes(self) -> int:
        """Estimate of their memory."""
        return sum(job.result().num_bytes for job in self._compiled.values() if job.done())

    def _evict(self) -> None:
        """Evict compiled grammars beyond the memory for them, the least recently used first."""
        excess = self.kept_bytes - KEPT_BYTES
        for key in [key for key, job in self._compiled.items() if job.done()][:-1]:
            if excess <= 0:
                return
            excess -= self._compiled.pop(key).result().num_bytes

    def _entry(self, wanted: StructuredOutputsParams) -> _Entry:
        try:
            return _Entry(self._compile(wanted), None)
        except OutriderError as error:
            error.__cause__ = error.__context__ = None  # with the frames that they hold
            return _Entry(None, error.with_traceback(None))
        except BaseException:  # a panic of the package, or no memory: a step that raises would shut down the engine
            logger.exception("a constraint could not be compiled")
            problem = f"{wanted.source}: the constraint could not be compiled; the server's log says why"
            return _Entry(None, InvalidRequestError(problem, param=wanted.source))

    def _compile(self, wanted: StructuredOutputsParams) -> CompiledGrammar:
        text, vocabulary = wanted.grammar_text(), self._load_vocabulary()

        def make() -> Any:
            from llguidance import LLMatcher

            matcher = on_deep_stack(
                lambda: LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=parser_limits()), source=wanted.source
            )
            if matcher.is_error():
                problem = matcher.get_error().splitlines()[0][:500]
                raise InvalidRequestError(f"{wanted.source}: {problem}", param=wanted.source)
            return matcher

        num_bytes = _BASE_BYTES + _BYTES_PER_CHARACTER * len(text)
        is_lexical = wanted.grammar is None and wanted.structural_tag is None
        return CompiledGrammar(make, vocabulary, num_bytes, is_lexical=is_lexical)

    def _load_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                tokenizer = self._load_tokenizer()
                self._vocabulary = _vocabulary(tokenizer, self._vocab_size)
                self._default_ends = frozenset({tokenizer.eos_token_id} - {None})
            except OutriderError:
                raise
            except Exception as error:  # the package raises many types, and a step that raises shuts down the engine
                raise InvalidRequestError(
                    f"structured_outputs are not served with this model's tokenizer: {error}",
                    param="structured_outputs",
                ) from error
        return self._vocabulary


def _vocabulary(tokenizer: Any, vocab_size: int) -> Vocabulary:
    """Vocabulary in the package's form. Takes 0.5 s for 50,000 tokens, most of it while Python's lock is held."""
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InvalidRequestError(
            f"structured_outputs need a tokenizer of the library tokenizers; this one is {type(tokenizer).__name__}",
            param="structured_outputs",
        )
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    backend.add_special_tokens([_END])
    end: int = backend.token_to_id(_END)  # type: ignore[assignment]  # it was just added
    if tokenizer.convert_ids_to_tokens(end) is not None:
        raise InvalidRequestError(
            "structured_outputs are not served with a tokenizer whose ids have gaps", param="structured_outputs"
        )
    separators = [token for text, token in backend.get_vocab().items() if text[:1] == "," or "}," in text]
    return Vocabulary(
        LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, end + 1), eos_token=end),
        end,
        np.array(sorted(separators)),
    )
