"""Log-probabilities that answers report, from the results of kernels on the host.

R rows of logits, V vocabulary, M given ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ....kernels.sampling import top_logprobs
from ....kernels.staging import Download, upload
from ...core.messages import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [R] and of the `k` most likely tokens under raw `logits` [R, V]."""
    chosen = upload(logits.device, np.array(tokens, dtype=np.int64))[0]
    return as_logprobs(tokens, k, *Download(top_logprobs(logits, chosen, k)).wait())


def as_logprobs(
    tokens: Sequence[int],
    k: int,
    ids: list[list[int]],
    values: list[list[float]],
    own: list[float],
    rank: list[int],
) -> list[TokenLogprobs]:
    """From lists of `top_logprobs` with at least `k` columns."""
    return [TokenLogprobs([token, *ids[i][:k]], [own[i], *values[i][:k]], rank[i]) for i, token in enumerate(tokens)]


def given_ids(lists: Sequence[Sequence[int]], counts: Sequence[int]) -> np.ndarray:
    """[R, M] int64: each of `lists`, with zeros up to the longest one's length, as many times as `counts` says."""
    table = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for line, ids in zip(table, lists, strict=True):
        line[: len(ids)] = ids
    return np.repeat(table, counts, axis=0)


def with_given(
    ids: Sequence[int], positions: list[TokenLogprobs], values: list[list[float]], ranks: list[list[int]]
) -> list[TokenLogprobs]:
    """The positions with `ids` instead of the top tokens, from lists of `logprobs_at` with at least as many columns."""
    count = len(ids)
    return [
        TokenLogprobs([own.token_ids[0], *ids], [own.logprobs[0], *values[i][:count]], own.rank, ranks[i][:count])
        for i, own in enumerate(positions)
    ]
