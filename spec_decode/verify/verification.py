"""Verification of drafts: two lossless rules. The output has the target's distribution, whatever the drafter.

Drafter-invariant (greedy and seeded requests): the token at position i is argmax(log p_i + G_i), where the noise G_i is
a function of the request's seed, i and the token id alone; a draft is right when it is that token. So the text, not
just its distribution, is the same for every drafter and every k. A drafter that draws with the same noise from its own
q is right with probability >= (1 - TV(p, q)) / (1 + TV(p, q)).
    Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".

Rejection sampling (the rest): accept draft d ~ q with probability min(1, p(d) / q(d)); at the first rejection draw from
norm(max(p - q, 0)) instead; when all are accepted, one more token from p. A draft is right with probability 1 - TV.
    Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
    Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", algorithm 2.

A request with k drafts brings 1 + k rows of logits: row j is the distribution p of the token after j drafts, after
every sampling parameter (penalties at row j count the drafts before j). Rows of requests with different k and different
rules lie one after the other; everything is computed for all of them at once and read back once. On a GPU that is one
launch (`kernels/verification`), which `choose` makes without waiting for it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels import verification as device_rules
from ...kernels.dispatch import use_triton
from ...kernels.noise import Stream, gumbel_argmax, row_keys, uniform
from ...kernels.staging import upload
from ...platform.core.request import Request


class Rule(enum.Enum):
    """Rule by which a request's tokens are chosen and its drafts verified."""

    GREEDY = "greedy"
    """The most likely token; the drafter-invariant rule without noise."""
    INVARIANT = "invariant"
    """Drafter-invariant, sampled."""
    REJECTION = "rejection"


def choose_rule(request: Request, invariant: bool) -> Rule:
    """The rule for `request`; `invariant`: the engine uses the drafter-invariant rule for all requests."""
    if request.params.greedy:
        return Rule.GREEDY
    return Rule.INVARIANT if invariant or request.deterministic else Rule.REJECTION


class VerifyRow(NamedTuple):
    """One request in a verification."""

    seed_key: int
    first_position: int
    """Index in the sequence of the token that row 0 decides: the length of the accepted sequence."""
    draft_ids: Sequence[int]
    draft_probs: Tensor | None
    """[k, V] float32: the distribution that each draft was drawn from, for `Rule.REJECTION`; None: drafts are certain,
    q is one-hot."""
    rule: Rule


class Verified(NamedTuple):
    """Result of a verification for one request."""

    token_ids: list[int]
    """The accepted drafts and one token more."""
    num_accepted: int


def verify(logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
    """Choose the next tokens of every request, with or without drafts.

    Args:
        logits: [sum(1 + k_i), V] float32 after every sampling parameter (`filter_logits` last), the rows' in order.
            A row without a finite maximum decides nothing: the caller must cut the result there.
        rows: the requests; k_i = len(draft_ids) may be 0.

    Returns:
        one `Verified` for each of `rows`: between 1 and 1 + k_i tokens.

    Raises:
        ValueError: the number of logits rows does not fit.
    """
    counts = [1 + len(row.draft_ids) for row in rows]
    if sum(counts) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {sum(counts)} positions")
    if not rows:
        return []
    if use_triton(logits):
        host = torch.cat(choose(logits, rows)).tolist()  # the only transfer
        return as_verified(rows, host[: sum(counts)], host[sum(counts) :])
    rejecting = np.array([row.rule is Rule.REJECTION for row in rows])
    coupled = [row for row in rows if row.rule is not Rule.REJECTION]
    sampled = [row for row in rows if row.rule is Rule.REJECTION]
    of_sampled = np.repeat(rejecting, counts)
    answers: list[Tensor] = []
    if coupled:
        answers.append(_coupled_tokens(_take(logits, ~of_sampled), coupled))
    if sampled:
        answers.extend(rejection_sample(_take(logits, of_sampled), sampled))
    host = torch.cat(answers).tolist()  # the only transfer

    end = len(host) - 2 * len(sampled)
    targets = iter(host[:end])
    choices = zip(host[end : end + len(sampled)], host[end + len(sampled) :], strict=True)
    results = []
    for row in rows:
        if row.rule is Rule.REJECTION:
            num_accepted, next_token = next(choices)
            results.append(Verified([*row.draft_ids[:num_accepted], next_token], num_accepted))
        else:
            results.append(accept_equal(row.draft_ids, [next(targets) for _ in range(1 + len(row.draft_ids))]))
    return results


def _take(logits: Tensor, mask: np.ndarray) -> Tensor:
    """The rows where `mask` holds; no copy when it holds everywhere."""
    if mask.all():
        return logits
    return logits.index_select(0, _device(np.flatnonzero(mask), logits))


def _device(array: np.ndarray, like: Tensor) -> Tensor:
    """[N] int64 on the device of `like`."""
    return upload(like.device, array)[0]


# --- on a GPU ------------------------------------------------------------------------------------------------

_RULES = {
    Rule.GREEDY: device_rules.GREEDY,
    Rule.INVARIANT: device_rules.INVARIANT,
    Rule.REJECTION: device_rules.REJECTION,
}


class Choices(NamedTuple):
    """Tokens chosen for B requests with R rows, on the device; the host has not waited for them."""

    token_ids: Tensor
    """[R] int64: in a request's rows its accepted drafts, the next token, and -1 after it."""
    num_accepted: Tensor
    """[B] int64"""


def choose(
    logits: Tensor,
    rows: Sequence[VerifyRow],
    stats: tuple[Tensor, Tensor] | None = None,
    overshoot: Tensor | None = None,
) -> Choices:
    """`verify` without waiting for the device.

    Args:
        logits, rows: those of `verify`; at least one row.
        stats: `row_stats` of `logits`, where the caller has them.
        overshoot: [B] int64 on the device: by how much the rows' `first_position` is too large; None: nowhere.
    """
    probs = [
        row.draft_probs
        for row in rows
        if row.rule is Rule.REJECTION and row.draft_probs is not None and len(row.draft_ids) > 0
    ]
    requests = device_rules.pack(
        drafts=[row.draft_ids for row in rows],
        certain=[row.rule is not Rule.REJECTION or row.draft_probs is None for row in rows],
        rules=[_RULES[row.rule] for row in rows],
        seed_keys=[row.seed_key for row in rows],
        first_positions=[row.first_position for row in rows],
        target=logits.device,
    )
    if overshoot is not None:
        requests.first_position.sub_(overshoot)
    return Choices(*device_rules.verify(logits, torch.cat(probs) if probs else None, requests, stats))


def as_verified(rows: Sequence[VerifyRow], token_ids: list[int], num_accepted: list[int]) -> list[Verified]:
    """The host's view of `Choices`."""
    results, start = [], 0
    for row, accepted in zip(rows, num_accepted, strict=True):
        results.append(Verified(token_ids[start : start + accepted + 1], accepted))
        start += 1 + len(row.draft_ids)
    return results


# --- the drafter-invariant rule ------------------------------------------------------------------------------


def target_tokens(
    logits: Tensor,
    seed_keys: Sequence[int],
    positions: Sequence[int],
    greedy: Sequence[bool],
    overshoot: Tensor | None = None,
) -> Tensor:
    """The token at each position: argmax(logits) for greedy rows, argmax(log p + G(seed_key, position)) for the others.

    log p and logits differ by a constant of the row, which no argmax sees; they are shifted to a maximum of zero, so
    that float32 resolves the noise next to them.

    Args:
        logits: [R, V] float32, filtered; -inf is never chosen.
        seed_keys, positions, greedy: [R] on the host.
        overshoot: [R] int64 on the device: by how much the positions are too large; None: nowhere.

    Returns:
        [R] int64 on the device of `logits`.
    """
    if use_triton(logits):
        rules = [Rule.GREEDY if is_greedy else Rule.INVARIANT for is_greedy in greedy]
        parts = zip(seed_keys, positions, rules, strict=True)
        verify_rows = [VerifyRow(seed, position, (), None, rule) for seed, position, rule in parts]
        return choose(logits, verify_rows, overshoot=overshoot).token_ids
    if overshoot is not None:
        positions = [position - by for position, by in zip(positions, overshoot.tolist(), strict=True)]
    is_greedy = np.asarray(greedy, dtype=bool)
    if is_greedy.all():
        return logits.argmax(dim=-1)
    noisy = np.flatnonzero(~is_greedy).tolist()
    scores = _take(logits, ~is_greedy)
    keys = row_keys([seed_keys[i] for i in noisy], [positions[i] for i in noisy], Stream.TARGET)
    tokens = gumbel_argmax(scores - scores.amax(dim=-1, keepdim=True), _device(keys.numpy(), logits))
    if len(noisy) == logits.shape[0]:
        return tokens
    return logits.argmax(dim=-1).index_copy_(0, _device(np.flatnonzero(~is_greedy), logits), tokens)


def accept_equal(draft_ids: Sequence[int], target_ids: Sequence[int]) -> Verified:
    """The longest prefix of k drafts that equals the 1 + k target tokens, and the target's token at that place."""
    accepted = 0
    while accepted < len(draft_ids) and draft_ids[accepted] == target_ids[accepted]:
        accepted += 1
    return Verified(list(target_ids[: accepted + 1]), accepted)


def _coupled_tokens(logits: Tensor, rows: Sequence[VerifyRow]) -> Tensor:
    """Target tokens [R] at all positions of `rows`, none of which uses rejection sampling."""
    seeds, positions = _counters(rows)
    greedy = [row.rule is Rule.GREEDY for row in rows for _ in range(1 + len(row.draft_ids))]
    return target_tokens(logits, seeds, positions, greedy)


def _counters(rows: Sequence[VerifyRow]) -> tuple[list[int], list[int]]:
    """Seed keys and absolute positions of the 1 + k_i logits rows of each of `rows`."""
    seeds = [row.seed_key for row in rows for _ in range(1 + len(row.draft_ids))]
    positions = [row.first_position + j for row in rows for j in range(1 + len(row.draft_ids))]
    return seeds, positions


# --- rejection sampling --------------------------------------------------------------------------------------


def rejection_sample(logits: Tensor, rows: Sequence[VerifyRow]) -> tuple[Tensor, Tensor]:
    """Leviathan's and Chen's rule for B requests with k_i drafts each.

        accept draft j while u_j q_j(d_j) < p_j(d_j);  next token ~ norm(max(p_a - q_a, 0)) at the first place a that is
        not accepted, with q_k = 0 after the last draft, which makes the bonus token a draw from p_k.

    A draft with q = 0 and p > 0 is accepted, one with p = 0 never. Where p - q has no positive part (p = q up to
    rounding), the next token is drawn from p.

    Args:
        logits: [sum(1 + k_i), V] float32, filtered.
        rows: B requests.

    Returns:
        (number of accepted drafts [B] int64, next token [B] int64) on the device of `logits`.
    """
    p = logits.softmax(dim=-1)
    ragged = _Ragged(rows, p)
    seeds, positions = _counters(rows)
    accept_keys = row_keys(seeds, positions, Stream.ACCEPT).to(p.device)
    residual_keys = row_keys(seeds, positions, Stream.RESIDUAL).to(p.device)

    accepted = torch.zeros(len(rows), dtype=torch.int64, device=p.device)
    if ragged.max_drafts:
        u = uniform(accept_keys)[ragged.at_draft]
        ok = u * ragged.q_of_draft < p[ragged.at_draft, ragged.draft_ids]
        accepted = ragged.padded(ok).cumprod(dim=1).sum(dim=1)
    place = ragged.first + accepted
    p_there = p.index_select(0, place)
    residual = ragged.subtract_q(p_there, accepted) if ragged.max_drafts else p_there
    empty = residual.amax(dim=-1, keepdim=True) <= 0.0
    next_tokens = gumbel_argmax(torch.where(empty, p_there, residual).log_(), residual_keys[place])
    return accepted, next_tokens


class _Ragged:
    """Indices into the flat logits rows of B requests with N drafts in all, and their drafts' distributions."""

    def __init__(self, rows: Sequence[VerifyRow], like: Tensor) -> None:
        k = np.array([len(row.draft_ids) for row in rows])
        first = np.concatenate([[0], np.cumsum(1 + k)[:-1]])
        request_of_draft = np.repeat(np.arange(len(rows)), k)
        index_in_request = np.concatenate([np.arange(n) for n in k])
        self.max_drafts = int(k.max())
        self.first = _device(first, like)
        """[B] logits row that decides each request's first token."""
        self.at_draft = _device(first[request_of_draft] + index_in_request, like)
        """[N] logits row that decides about each draft."""
        self.draft_ids = _device(np.array([d for row in rows for d in row.draft_ids], dtype=np.int64), like)
        self._where = (_device(request_of_draft, like), _device(index_in_request, like))
        self._num_requests = len(rows)
        self._num_drafts = _device(k, like)

        # Requests with a distribution of their own for each draft, and those whose drafts are certain.
        dense = np.array([row.draft_probs is not None and n > 0 for row, n in zip(rows, k, strict=True)])
        self._dense = _device(np.flatnonzero(dense), like)
        self._certain = _device(np.flatnonzero(~dense & (k > 0)), like)
        stacked = [row.draft_probs for row, has in zip(rows, dense, strict=True) if has and row.draft_probs is not None]
        self._q = torch.cat(stacked) if stacked else like[:0]
        self._first_q = _device(np.concatenate([[0], np.cumsum(k[dense])[:-1]]).astype(np.int64), like)
        self.q_of_draft = torch.ones(len(request_of_draft), dtype=like.dtype, device=like.device)
        """[N] q of each draft itself; 1 where it was certain."""
        if stacked:
            drafts = _device(np.flatnonzero(dense[request_of_draft]), like)
            self.q_of_draft[drafts] = self._q.gather(1, self.draft_ids[drafts].unsqueeze(1)).squeeze(1)

    def padded(self, ok: Tensor) -> Tensor:
        """[N] bool to [B, max_drafts] int64, 0 where there is no draft."""
        out = torch.zeros((self._num_requests, self.max_drafts), dtype=torch.int64, device=ok.device)
        return out.index_put_(self._where, ok.to(torch.int64))

    def subtract_q(self, p: Tensor, accepted: Tensor) -> Tensor:
        """max(p - q, 0) [B, V] with q that of draft number `accepted` [B]; p itself where all drafts were accepted."""
        rejected = accepted < self._num_drafts
        residual = p.clone()
        if self._dense.numel():
            place = (self._first_q + accepted[self._dense]).clamp_(max=self._q.shape[0] - 1)
            # Where the drafter failed (q is NaN) its draft was rejected, whatever u; then the token is a draw from p.
            q = self._q.index_select(0, place).nan_to_num_(0.0) * rejected[self._dense].unsqueeze(1)
            residual.index_add_(0, self._dense, q, alpha=-1).clamp_(min=0.0)
        if self._certain.numel():
            at = torch.minimum(accepted, self._num_drafts - 1).clamp_(min=0)
            drafts = torch.zeros((self._num_requests, self.max_drafts), dtype=torch.int64, device=p.device)
            drafts.index_put_(self._where, self.draft_ids)
            token = drafts.gather(1, at.unsqueeze(1))[self._certain]
            kept = residual[self._certain].gather(1, token) * ~rejected[self._certain].unsqueeze(1)
            residual[self._certain.unsqueeze(1), token] = kept
        return residual
