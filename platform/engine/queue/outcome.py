"""Outcome of a row for its sequence: the tokens that count, and whether they end it."""

from __future__ import annotations

from ...core.batch import RowPlan, RowResult
from ...core.messages import PromptTable, TokenDelta
from ...core.repetition import RepetitionDetectionParams
from ...core.request import NO_DRAFTS, Request
from .repetition import Repetition


def accept(row: RowPlan, got: RowResult, max_model_len: int) -> TokenDelta | None:
    """Apply `got` to `row.request`; returns the client's output, or None when there is none yet.

    If `a` of `k` drafts are accepted, `num_computed_tokens` grows by the row's tokens less the `k - a` rejected ones.
    The next step overwrites the KV of those.
    """
    request = row.request
    if got.error is not None:
        return TokenDelta(request.request_id, error=got.error)
    request.num_computed_tokens = row.start + row.num_tokens - row.num_drafts + got.num_accepted - got.is_deferred
    if got.prompt_logprobs is not None:
        if request.prompt_logprobs is None:
            request.prompt_logprobs = PromptTable()
        request.prompt_logprobs.extend(got.prompt_logprobs)
    if got.pooled is not None:
        request.pooled = got.pooled if request.pooled is None else request.pooled + got.pooled
        if row.end >= request.num_prompt_tokens:
            return _pooled(request)
    drafter, request.drafts = request.drafts.drafter, NO_DRAFTS
    # Later positions held rejected drafts.
    request.num_draft_computed = min(request.num_draft_computed, len(request.tokens) + got.num_accepted)
    if not got.token_ids:
        return None
    first = len(request.tokens) == request.num_prompt_tokens
    reason: str | None = None
    stop: int | str | None = None
    kept = 0
    for token in got.token_ids:
        request.tokens.append(token)
        kept += 1
        reason, stop = _finish_reason(request, token, max_model_len)
        if reason is not None:
            break
    delta = TokenDelta(request.request_id, got.token_ids[:kept], finish_reason=reason, stop_reason=stop)
    if row.num_drafts:
        delta.num_draft_tokens, delta.num_accepted = row.num_drafts, min(got.num_accepted, kept)
    if request.speculation_totals is not None and not row.is_forced:
        for counts in (request.speculation, request.speculation_totals):
            counts.count(row.num_drafts, delta.num_accepted, drafter, kept)
    if got.logprobs is not None:
        delta.logprobs = got.logprobs[:kept]
    if first:
        _with_facts(delta, request)
    if request.speculation_totals is not None:
        delta.speculation = request.speculation
    return delta


def _pooled(request: Request) -> TokenDelta:
    """The only delta of a request that pools its prompt."""
    delta = TokenDelta(request.request_id, finish_reason="stop", pooled=request.pooled.tolist())
    return _with_facts(delta, request)


def _with_facts(delta: TokenDelta, request: Request) -> TokenDelta:
    """`delta`, the first of its sequence, with the fields that only the first one has."""
    delta.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    delta.num_cached_tokens, delta.queue_seconds = request.num_cached_tokens, request.queue_seconds
    delta.adapter_digest = request.text_namespace[1].hex()
    return delta


def ends_after(request: Request, max_model_len: int) -> bool:
    """True if the rows in flight of `request`, at least one, reach its last allowed token when all their drafts are
    right, whatever the tokens."""
    if request.params.pooling is not None:
        return request.num_planned >= request.num_prompt_tokens
    row = request.in_flight[-1]
    return (row.end + 1 if row.samples else len(request.tokens)) >= min(request.sampling.most_tokens, max_model_len)


def _finish_reason(request: Request, token: int, max_model_len: int) -> tuple[str | None, int | str | None]:
    """(finish_reason, stop_reason) after `token` became the sequence's last; (None, None) to continue."""
    params, length = request.params, len(request.tokens)
    repeats = params.repetition_detection is not None and _repeats(request, params.repetition_detection, token)
    if length - request.num_prompt_tokens >= params.min_tokens:
        if token in request.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token in request.sampling.stop_ids:
            return "stop", token
    if length >= min(request.sampling.most_tokens, max_model_len):
        return "length", None
    if repeats and length - request.num_prompt_tokens >= params.min_tokens:
        return "repetition", "repetition_detected"
    return None, None


def _repeats(request: Request, params: RepetitionDetectionParams, token: int) -> bool:
    """True if `token`, the sequence's last, completes a repetition. To be called for each of its tokens."""
    if request.repetition is None:
        request.repetition = Repetition(params)
    return bool(request.repetition.add(token))
