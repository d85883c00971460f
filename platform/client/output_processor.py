"""Token deltas of the engine to the outputs users get.

`OutputProcessor` holds the state of every running request. A delta is folded into that state at once; an output is made
only when it is consumed. So a slow consumer gets one output with all that is new, and no queue can grow.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..core.errors import OutriderError, error_from_info, invalid
from ..core.logs import format_trace
from ..core.lora_request import LoRA
from ..core.messages import EngineRequest, SpeculationCounts, TokenDelta
from ..core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .metrics import RequestTotals
from .prepared import Prepared
from .text.detokenizer import IncrementalDetokenizer
from .text.vocabulary import PromptLogprobs, TokenTexts, logprobs_without_text, read_vocabulary

logger = logging.getLogger(__name__)


class SequenceState:
    """One of a request's sequences: everything generated so far, and how much of it has been taken."""

    def __init__(self, index: int, request: EngineRequest, tokenizer: Any) -> None:
        params = request.params
        self.index = index
        self.request_id = request.request_id
        self.token_ids: list[int] = []
        self.drafted: list[bool] = []
        self.rejected_drafts: list[int] = []
        """`drafted` and `rejected_drafts` are aligned with `token_ids`, as in `CompletionOutput`."""
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.speculation: SpeculationCounts | None = None
        self._include_stop = params.include_stop_str_in_output
        self._texts: TokenTexts | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params, request.prompt_token_ids)
            if params.logprobs is not None:
                at_start = not self._detokenizer.has_text_before
                self._texts = TokenTexts(read_vocabulary(tokenizer), params.skip_special_tokens, at_start)
        self._taken_tokens = 0
        self._taken_chars = 0
        self.has_changed = False
        """True when anything has come since the last `take`."""

    def update(self, delta: TokenDelta) -> bool:
        """Append a delta. True when a stop string ended the sequence here and the engine does not know yet."""
        token_ids, finish_reason = delta.token_ids, delta.finish_reason
        stop_reason: int | str | None = delta.stop_reason
        stopped_here = False
        # The last token is not in the text when it has ended the sequence by itself.
        is_shown, is_last = finish_reason != "stop" or self._include_stop, finish_reason is not None
        if self._detokenizer is not None:
            match = self._detokenizer.update(token_ids, ends_with_stop_token=finish_reason == "stop")
            if match is not None:
                stopped_here = finish_reason is None
                token_ids, finish_reason, stop_reason = token_ids[: match.num_tokens], "stop", match.stop
                is_shown, is_last = True, False
        self.token_ids.extend(token_ids)
        num_accepted = min(delta.num_accepted, len(token_ids))
        self.drafted += [True] * num_accepted + [False] * (len(token_ids) - num_accepted)
        if token_ids:
            self.rejected_drafts += [0] * (len(token_ids) - 1) + [delta.num_draft_tokens - delta.num_accepted]
        if self.logprobs is not None and delta.logprobs is not None:
            positions, texts = delta.logprobs[: len(token_ids)], self._texts
            for i, position in enumerate(positions, 1 - len(positions)):
                self.logprobs.append(
                    logprobs_without_text(position)
                    if texts is None
                    else texts.logprobs(position, is_last=is_last and i == 0, is_shown=is_shown or i < 0)
                )
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + position.logprobs[0]
        if delta.speculation is not None:
            self.speculation = delta.speculation
        self.has_changed = True
        if finish_reason is not None:
            self.finish(finish_reason, stop_reason)
        return stopped_here

    def finish(self, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """Complete the sequence: no token will follow."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self.has_changed = True
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def take(self, delta: bool) -> CompletionOutput | None:
        """The output since the last call (None when nothing is new), or everything so far."""
        if delta and not self.has_changed:
            return None
        detokenizer = self._detokenizer
        num_chars = detokenizer.num_safe_chars() if detokenizer is not None else 0
        first_token, first_char = (self._taken_tokens, self._taken_chars) if delta else (0, 0)
        logprobs = self.logprobs
        if delta and logprobs is not None:
            self.logprobs = []  # the consumer of the pieces has them
        output = CompletionOutput(
            index=self.index,
            text=detokenizer.text[first_char:num_chars] if detokenizer is not None else "",
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if logprobs is None else list(logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            drafted=self.drafted[first_token:],
            rejected_drafts=self.rejected_drafts[first_token:],
        )
        self._taken_tokens, self._taken_chars, self.has_changed = len(self.token_ids), num_chars, False
        return output


class RequestState:
    """A running request with its `n` sequences."""

    def __init__(self, prepared: Prepared, sequences: list[SequenceState], lora: LoRA | None) -> None:
        self.request_id = prepared.request_id
        self.sequences = sequences
        self.error: OutriderError | None = None
        self.metrics = RequestMetrics(arrival_time=prepared.arrival_time)
        self._prompt = prepared.prompt.text
        self._prompt_token_ids = prepared.prompt.token_ids
        self._prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        self.pooled: list[float] | None = None
        """Pooled hidden states of the prompt, if requested."""
        self._lora = lora
        self._vocabulary = read_vocabulary(prepared.tokenizer) if prepared.params.detokenize else None

    @property
    def finished(self) -> bool:
        """True when nothing more will come: every sequence is complete, or the request failed."""
        if self.error is None:
            for sequence in self.sequences:  # asked several times a token, so without a generator
                if sequence.finish_reason is None:
                    return False
        return True

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._prompt_token_ids)

    def running(self) -> list[str]:
        """Engine ids of the sequences that are not complete."""
        return [sequence.request_id for sequence in self.sequences if sequence.finish_reason is None]

    def update(self, sequence: SequenceState, delta: TokenDelta) -> bool:
        """Fold in a delta of one sequence; see `SequenceState.update`."""
        metrics = self.metrics
        if delta.token_ids and metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
        if sequence.index == 0:  # the others find the first one's blocks in the cache
            metrics.num_cached_tokens = max(metrics.num_cached_tokens, delta.num_cached_tokens)
            metrics.queue_seconds = max(metrics.queue_seconds, delta.queue_seconds)
        metrics.adapter_digest = metrics.adapter_digest or delta.adapter_digest
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = PromptLogprobs(self._prompt_token_ids, delta.prompt_logprobs, self._vocabulary)
        if delta.pooled is not None:
            self.pooled = delta.pooled
        stopped_here = sequence.update(delta)
        if sequence.finish_reason is not None and self.finished:
            self.close()
        return stopped_here

    def close(self) -> None:
        """Set the metrics that are known at the end."""
        self.metrics.finished_time = time.monotonic()
        self.count_speculation()

    def count_speculation(self) -> None:
        """Bring the counts of drafts in the metrics up to date, which only `close` does by itself."""
        metrics, total = self.metrics, SpeculationCounts()
        for sequence in self.sequences:
            if sequence.speculation is not None:
                total.add(sequence.speculation)
        for counter in dataclasses.fields(SpeculationCounts):
            setattr(metrics, counter.name, getattr(total, counter.name))

    def take(self, delta: bool = False) -> RequestOutput:
        """The request so far; with `delta`, what is new since the last call (prompt log-probabilities: once).

        Raises:
            OutriderError: the request failed. With `delta` that comes after what was generated before.
        """
        if self.error is not None and not (delta and any(sequence.has_changed for sequence in self.sequences)):
            raise self.error
        outputs = [sequence.take(delta) for sequence in self.sequences]
        prompt_logprobs = self._prompt_logprobs
        if delta:
            self._prompt_logprobs = None if prompt_logprobs is None else []
        elif prompt_logprobs is not None:
            prompt_logprobs = self._prompt_logprobs = list(prompt_logprobs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[output for output in outputs if output is not None],
            finished=self.finished and self.error is None,
            metrics=self.metrics,
            prompt_logprobs=prompt_logprobs or None,
            lora_request=self._lora,
            pooled=self.pooled,
        )


class Processed(NamedTuple):
    """Result of processing a batch of deltas."""

    touched: list[RequestState]
    """Requests that the deltas changed, each once. Finished ones are no longer in the processor."""
    aborts: list[str]
    """Engine ids to abort: ended by a stop string, or their request failed."""


class OutputProcessor:
    """The running requests of one client."""

    def __init__(self) -> None:
        self.totals = RequestTotals()
        """Counts of finished requests."""
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, tuple[RequestState, SequenceState]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, prepared: Prepared, requests: list[EngineRequest]) -> RequestState:
        """Expect deltas for the sequences of a request."""
        request_id = prepared.request_id
        taken = [request.request_id for request in requests if request.request_id in self._sequences]
        if taken or request_id in self._requests:
            raise invalid("request_id", f"{request_id!r} is already running")
        sequences = [SequenceState(i, request, prepared.tokenizer) for i, request in enumerate(requests)]
        state = RequestState(prepared, sequences, requests[0].lora)
        self._requests[request_id] = state
        for sequence in sequences:
            self._sequences[sequence.request_id] = (state, sequence)
        return state

    def process(self, deltas: Iterable[TokenDelta]) -> Processed:
        """Fold deltas into the requests; those of unknown (finished, aborted) sequences are ignored."""
        touched: dict[str, RequestState] = {}
        aborts: list[str] = []
        for delta in deltas:
            state, sequence = self._sequences.get(delta.request_id, (None, None))
            if state is None or sequence is None:
                continue
            touched[state.request_id] = state
            try:
                if delta.error is not None:
                    raise error_from_info(delta.error)
                if state.update(sequence, delta):
                    aborts.append(sequence.request_id)
            except OutriderError as error:
                aborts.extend(self._fail(state, error))
            except Exception as error:  # one request's text must not stop the others
                logger.error("Cannot process the output of request %s: %s", state.request_id, format_trace(error))
                # Not what it says: that may quote the text.
                aborts.extend(self._fail(state, OutriderError(f"internal error: {type(error).__name__}")))
            if sequence.finish_reason is not None:
                self._sequences.pop(sequence.request_id, None)
            elif state.error is None:
                continue
            if state.finished and self._requests.pop(state.request_id, None) is not None and state.error is None:
                self.totals.count(state)
        return Processed(list(touched.values()), aborts)

    def get(self, request_id: str) -> RequestState | None:
        """The running request of that id."""
        return self._requests.get(request_id)

    def abort(self, request_id: str) -> list[str]:
        """End a request with finish reason "abort"; returns the engine ids to abort. Unknown ids are ignored."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return []
        running = self._forget(state)
        for sequence in state.sequences:
            if sequence.finish_reason is None:
                sequence.finish("abort")
        state.close()
        return running

    def fail_all(self, error: OutriderError) -> list[RequestState]:
        """Fail every running request, each with its own copy of `error`; returns them."""
        states = list(self._requests.values())
        for state in states:
            self._fail(state, error_from_info(error.info()))
        return states

    def _fail(self, state: RequestState, error: OutriderError) -> list[str]:
        state.error = error
        state.close()
        self._requests.pop(state.request_id, None)
        return self._forget(state)

    def _forget(self, state: RequestState) -> list[str]:
        running = state.running()
        for request_id in running:
            self._sequences.pop(request_id, None)
        return running
