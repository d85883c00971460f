"""Sampling parameters against the limits of a model: one rule for the clients and the engine."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import InvalidRequestError
from .sampling_params import SamplingParams


def check_params(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Refuse what `params` ask of a model that cannot do it. Pure.

    `bad_words_token_ids` count as `bad_words`, which they are made from.

    Raises:
        InvalidRequestError: a token id is not below `vocab_size`, there are more allowed tokens than that, a bad word
            has no token, or more than `max_logprobs` log-probabilities are wanted; `param` names the field.
    """
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        count = vocab_size if value == -1 else value
        if count is not None and count > max_logprobs:
            meaning = f", all {vocab_size} tokens of the vocabulary" if value == -1 else ""
            raise InvalidRequestError(
                f"{name} is {value}{meaning}, above the engine's max_logprobs {max_logprobs}", param=name
            )
    check_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    allowed = params.allowed_token_ids or ()
    if len(allowed) > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(allowed)} entries, more than the vocabulary of {vocab_size} tokens",
            param="allowed_token_ids",
        )
    check_token_ids("allowed_token_ids", allowed, vocab_size)
    for word in params.bad_words_token_ids:
        if not word:
            raise InvalidRequestError("bad_words: a word has no tokens", param="bad_words")
        check_token_ids("bad_words", word, vocab_size)


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; `name` is the field they stand in."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name}: token id {token_id} is outside the vocabulary of {vocab_size} tokens", param=name
            )
