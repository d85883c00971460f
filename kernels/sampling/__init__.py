"""A request's distribution, from logits, and its reported log-probabilities.

Every function works row by row: a row's result does not depend, bit for bit, on other rows or their parameters. So a
request gets the same text alone, in a batch, and with any number of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, float32

from ..dispatch import use_triton

# In this package the name `torch` is the module next to this file: `import torch` here would hide it.
from . import native as _native
from . import torch as _reference

GREEDY_TEMPERATURE = 1e-5
"""Temperature below which a row is greedy, as in `SamplingParams.greedy`."""


def _host(name: str, values: Sequence[float] | Tensor | np.ndarray, rows: int) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (rows,):
        raise ValueError(f"{name} must be [{rows}], got {list(array.shape)}")
    return array


def filter_logits(
    logits: Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int] | None = None,
    top_p: Sequence[float] | None = None,
    min_p: Sequence[float] | None = None,
) -> Tensor:
    """Logits of the distribution after temperature, min-p, top-k and top-p, in this order (vLLM's).

    min-p keeps tokens of at least `min_p` times the top probability; top-k keeps the k largest logits and all that
    equal the k-th; top-p keeps the smallest set of most likely tokens, of what min-p and top-k left, that has a mass
    of at least `top_p`, lower ids first among equals. At least one token is always kept, of those that have mass: a row
    that is all -inf stays so, and the caller must discard the result of one with NaN or +inf.

    Args:
        logits: [R, V] float32; -inf is a mass of exactly zero and stays so. Not changed.
        temperature: [R] on the host, like the rest; rows below `GREEDY_TEMPERATURE` are returned as they are.
        top_k: [R]; 0, -1 and anything from V on: no limit.
        top_p: [R] in (0, 1]; 1 is no limit.
        min_p: [R] in [0, 1]; 0 is no limit.

    Returns:
        [R, V] float32, -inf where the mass is zero; `logits` itself when there is nothing to do.

    Raises:
        ValueError: a parameter has the wrong length, or `logits` the wrong type.
    """
    if logits.ndim != 2 or logits.dtype != float32:
        raise ValueError(f"logits must be float32 [R, V], got {logits.dtype} {list(logits.shape)}")
    num_rows, num_tokens = logits.shape
    heat = _host("temperature", temperature, num_rows)
    sampled = heat >= GREEDY_TEMPERATURE
    heat = np.where(sampled, heat, 1.0)
    k = np.zeros(num_rows) if top_k is None else _host("top_k", top_k, num_rows)
    p = np.ones(num_rows) if top_p is None else _host("top_p", top_p, num_rows)
    m = np.zeros(num_rows) if min_p is None else _host("min_p", min_p, num_rows)
    limits = _reference.Limits(
        top_k=np.where(sampled & (k > 0) & (k < num_tokens), k, 0).astype(np.int64),
        top_p=np.where(sampled & (p < 1.0), p, 1.0),
        min_p=np.where(sampled & (m > 0.0), m, 0.0),
    )
    if use_triton(logits):
        from . import triton as _triton

        idle = not limits.rows.size and (heat == 1.0).all()
        return logits if idle else _triton.filter_logits(logits, heat, limits)
    scaled = logits if (heat == 1.0).all() else _reference.divide(logits, heat)
    if not limits.rows.size:
        return scaled
    return _reference.apply_limits(scaled, limits, in_place=scaled is not logits)


def most_likely(logits: Tensor) -> tuple[list[int], list[float]]:
    """Most likely token of each row and its logit, on the host: the greedy choice.

    Args:
        logits: [R, V] float32, V at least 1.

    Returns:
        (token ids [R], the first ones among equals; their logits [R], NaN if any logit of the row is NaN).
    """
    found = _native.most_likely(logits)
    if found is not None:
        return found
    tops, tokens = logits.max(dim=-1)  # NaN counts as the largest
    return tokens.tolist(), tops.tolist()


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the raw distribution softmax(logits).

    Args:
        logits: [R, V] float32.
        chosen: [R] int64 token ids.
        k: how many of the most likely tokens to report; at most V are.

    Returns:
        (ids [R, k] int64, most likely first, lower ids first among equals; logprobs [R, k] float32;
        chosen_logprob [R] float32; chosen_rank [R] int64, 1 + the number of strictly more likely tokens).

    Raises:
        ValueError: the shapes do not fit, or k is negative.
    """
    if logits.ndim != 2 or chosen.shape != logits.shape[:1] or k < 0:
        raise ValueError(f"logits {list(logits.shape)}, chosen {list(chosen.shape)} and k={k} do not fit")
    k = min(k, logits.shape[1])
    if use_triton(logits):
        from . import triton_logprobs as _triton

        if k <= _triton.MAX_LOGPROBS:
            return _triton.top_logprobs(logits, chosen, k)
    return _reference.top_logprobs(logits, chosen, k)


def logprobs_at(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of given tokens under softmax(logits).

    Args:
        logits: [R, V] float32.
        ids: [R, M] int64 token ids.

    Returns:
        (logprobs [R, M] float32; ranks [R, M] int64, 1 + the number of strictly more likely tokens).

    Raises:
        ValueError: the shapes do not fit.
    """
    if logits.ndim != 2 or ids.ndim != 2 or ids.shape[0] != logits.shape[0]:
        raise ValueError(f"logits {list(logits.shape)} and ids {list(ids.shape)} do not fit")
    return _reference.logprobs_at(logits, ids)


def row_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials of each row, which a softmax needs.

    Args:
        logits: [R, V] float32.

    Returns:
        (maximum [R]; sum of exp(logit - maximum) [R]), float32; both are NaN if a logit is NaN.
    """
    if use_triton(logits):
        from . import triton_logprobs as _triton

        return _triton.row_stats(logits)
    return _reference.row_stats(logits)


__all__ = ["GREEDY_TEMPERATURE", "filter_logits", "logprobs_at", "most_likely", "row_stats", "top_logprobs"]
