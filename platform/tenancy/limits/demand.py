"""Demand of a request on its limits, and the part of it that a tenant's and a key's limits allow one request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...core.errors import InvalidRequestError, invalid
from ...core.model_limits import check_context
from ..accounts.principal import Limits

_OF_TENANT = " for this tenant or key (max_context_tokens)"


@dataclass(frozen=True, slots=True)
class Demand:
    """A request in numbers. `n` sequences of each of several prompts count as what they are: `n` requests for each, and
    `n` times `max_tokens`; a prompt is computed once."""

    prompt_tokens: tuple[int, ...]
    n: int = 1
    max_tokens: int | None = None
    """`max_tokens` of the request; None: not given. 0: the prompts are only scored."""
    room: tuple[int, ...] = ()
    """The most tokens after each prompt if `max_tokens` is not given: its default, or what the model's context
    leaves."""
    max_tokens_field: str = "max_tokens"
    """Name of the field in the request."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the engine runs for it."""
        return self.n * len(self.prompt_tokens)

    def num_tokens(self, max_tokens: Sequence[int]) -> int:
        """The most that it can use, with these for each prompt."""
        return sum(self.prompt_tokens) + self.n * sum(max_tokens)


def fit(demand: Demand, limits: Sequence[Limits], most_tokens: int | None = None) -> list[int]:
    """`max_tokens` for each prompt. One that the client named is never changed; else it is as large as the room after
    the prompt and the limits allow.

    Args:
        limits: all of which hold.
        most_tokens: that the whole request should use, if no `max_tokens` is named and a token remains for each
            sequence.

    Raises:
        InvalidRequestError: a prompt or the named `max_tokens` is above a limit, or there are more sequences or tokens
            than a limit will ever allow; `param` is the field, the message names the limit.
    """
    context = _least(limit.max_context_tokens for limit in limits)
    output = _least(limit.max_output_tokens for limit in limits)
    rate = _least(limit.tokens_per_minute for limit in limits)
    if context is not None:
        _check_tenant_context(demand, context)
    _check_sequences(demand, limits)
    named = demand.max_tokens
    if named is not None:
        if output is not None and named > output:
            raise invalid(demand.max_tokens_field, f"is {named}; max_output_tokens of this tenant or key is {output}")
        granted = [named] * len(demand.prompt_tokens)
    else:
        granted = [most if output is None else min(most, output) for most in demand.room]
        if context is not None:
            lengths = zip(granted, demand.prompt_tokens, strict=True)
            granted = [min(most, context - length) for most, length in lengths]  # the check has left at least 1
        room = _least((rate, most_tokens))
        if room is not None and demand.num_tokens(granted) > room:
            share = (room - sum(demand.prompt_tokens)) // demand.num_sequences
            granted = [max(1, min(share, most)) for most in granted]
    _check_rate(demand, demand.num_tokens(granted), rate)
    return granted


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _check_tenant_context(demand: Demand, context: int) -> None:
    """Refuse more than `max_context_tokens`, which is an operator's limit of a tenant or key, below the model's."""
    check_context(
        context,
        max(demand.prompt_tokens),
        1 if demand.max_tokens is None else demand.max_tokens,
        max_tokens_field=demand.max_tokens_field,
        of=_OF_TENANT,
    )


def _check_sequences(demand: Demand, limits: Sequence[Limits]) -> None:
    """Refuse more sequences than there are slots, or requests a minute: they would never be admitted."""
    for limit in limits:
        for name in ("max_concurrent_requests", "requests_per_minute"):
            bound = getattr(limit, name)
            if bound is not None and demand.num_sequences > bound:
                raise InvalidRequestError(
                    f"the request is for {demand.num_sequences} sequences (n x prompts); {name} of this tenant or key "
                    f"is {bound}",
                    param="n" if demand.n > 1 else "prompt",
                )


def _check_rate(demand: Demand, tokens: int, most: int | None) -> None:
    if most is not None and tokens > most:
        raise InvalidRequestError(
            f"the request may use {tokens} tokens (prompts, and {demand.max_tokens_field} for each of "
            f"{demand.num_sequences} sequences); tokens_per_minute of this tenant or key is {most}",
            param="prompt" if sum(demand.prompt_tokens) >= most else demand.max_tokens_field,
        )
