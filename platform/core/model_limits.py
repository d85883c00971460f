"""Lengths and sampling parameters against the limits of a model: one rule for the clients and the engine."""

from __future__ import annotations

from collections.abc import Collection

from .errors import InvalidRequestError, PromptTooLongError, invalid
from .sampling_params import CLASSIFY, SamplingParams, quote_for_error

MAX_BAD_WORD_TOKENS = 1 << 14
"""Largest number of tokens in one request's bad words: an automaton is built from them, in two microseconds a token."""
MAX_BAD_WORD_TOKENS_X_N = 1 << 19
"""Largest number of tokens in the bad words, counted once for each sequence of a request: each is sent to the engine
with them."""
MAX_TOKEN_IDS = 1 << 31
"""Bound of all token ids, whatever the vocabulary."""
MAX_ALLOWED = 1 << 21
"""Largest number of allowed tokens, counted once for each sequence: a step looks at all of them."""


def check_context(
    limit: int,
    num_prompt_tokens: int,
    max_tokens: int = 1,
    *,
    only_scores: bool = False,
    prompt: str = "prompt",
    max_tokens_field: str = "max_tokens",
    of: str = "",
) -> int:
    """Number of tokens that a prompt leaves in a context of `limit` tokens. Pure.

    Args:
        only_scores: the prompt may fill the context: the token after its last one is predicted, and takes no position.
        prompt, max_tokens_field: the client's names of the two fields.
        of: as in `PromptTooLongError.of`.

    Raises:
        PromptTooLongError: fewer than `max_tokens`; `param` is `max_tokens_field`, or `prompt` if there is no room.
    """
    room = limit - num_prompt_tokens
    if only_scores and room == 0:
        room = 1
    if max_tokens > room:
        param = max_tokens_field if room > 0 else prompt
        raise PromptTooLongError.of(limit, num_prompt_tokens, max_tokens, prompt=prompt, param=param, of=of)
    return room


def check_params(
    params: SamplingParams,
    vocab_size: int,
    max_logprobs: int,
    num_token_ids: int | None = None,
    num_labels: int = 0,
) -> None:
    """Refuse parameters that a model cannot serve. Pure. `num_token_ids`: bound of token ids, if an adapter may have
    more than the model's. `num_labels`: as in `EngineInfo`.

    `bad_words_token_ids` count as `bad_words`, which they are made from.

    Raises:
        InvalidRequestError: a token id is not below `vocab_size`, there are more allowed tokens than that, a bad word
            has no token, the bad words have too many, more than `max_logprobs` log-probabilities are wanted,
            `pooling` with fields of generated text, text of a classifier, labels of another model, or a bound of
            reasoning without its end; `param` names
            the field.
    """
    if num_labels and params.pooling is None:
        raise InvalidRequestError("a classifier generates no text: it has no language-model head", param="model")
    if params.pooling == CLASSIFY and not num_labels:
        raise InvalidRequestError(
            "the model does not classify: it has no score matrix, as those named ...ForSequenceClassification have",
            param="model",
        )
    for name, neutral in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
        if params.pooling is not None and getattr(params, name) != neutral:
            raise invalid(name, "is not served with pooling, which generates no text")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        count = vocab_size if value == -1 else value
        if count is not None and count > max_logprobs:
            meaning = f", all {vocab_size} tokens of the vocabulary" if value == -1 else ""
            raise invalid(name, f"is {value}{meaning}, above the engine's max_logprobs {max_logprobs}")
    if params.thinking_token_budget is not None and params.thinking_end_token_ids is None:
        raise invalid(
            "thinking_token_budget",
            "needs thinking_end_token_ids: the model has no token </think>, and no reasoning parser names another",
        )
    allowed = params.allowed_token_ids or ()
    if len(allowed) > vocab_size:
        raise invalid(
            "allowed_token_ids", f"has {len(allowed)} entries, more than the vocabulary of {vocab_size} tokens"
        )
    _check_total("allowed_token_ids", len(allowed), params.n, MAX_ALLOWED)
    num_tokens = sum(map(len, params.bad_words_token_ids))
    _check_total("bad_words", num_tokens, 1, MAX_BAD_WORD_TOKENS)
    _check_total("bad_words", num_tokens, params.n, MAX_BAD_WORD_TOKENS_X_N)
    for word in params.bad_words_token_ids:
        if not word:
            raise InvalidRequestError("bad_words: a word has no tokens", param="bad_words")
    check_params_tokens(params, vocab_size if num_token_ids is None else num_token_ids)


def check_params_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Refuse (InvalidRequestError) parameters with a token id that is not below `vocab_size`."""
    check_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    for name in ("allowed_token_ids", "logprob_token_ids", "thinking_start_token_ids", "thinking_end_token_ids"):
        check_token_ids(name, getattr(params, name) or (), vocab_size)
    for word in params.bad_words_token_ids:
        check_token_ids("bad_words", word, vocab_size)


def _check_total(name: str, num_tokens: int, n: int, most: int) -> None:
    if num_tokens * n > most:
        times = f" for each of n = {n} sequences" if n > 1 else ""
        raise invalid(name, f"has {num_tokens} tokens{times}; at most {most} are taken{' in all' if times else ''}")


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; `name` is their field."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):  # no loop in Python: they may be many
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name}: token id {quote_for_error(token_id)} is outside the vocabulary of {vocab_size} tokens",
                param=name,
            )
