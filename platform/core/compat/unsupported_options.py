"""Options of other systems that have no counterpart here: accepted values, and why others are refused."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..errors import InvalidRequestError
from ..text import did_you_mean

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Option(NamedTuple):
    """An option that has no counterpart here."""

    harmless: tuple[object, ...] | None
    """Values, in addition to None, that match the actual behaviour; None: every value is accepted, without an
    effect."""
    why: str
    """Reason why it has no effect, or why other values are refused."""
    flag: bool = False
    """True for a flag, which has no value on the command line."""


def ignored(why: str) -> Option:
    """An option without an effect, whatever its value."""
    return Option(None, why)


def ignored_flag(why: str) -> Option:
    """A flag without an effect."""
    return Option(None, why, flag=True)


def only(*harmless: object, why: str) -> Option:
    """An option that is refused at any other value."""
    return Option(harmless, why)


def off(why: str) -> Option:
    """A flag that is refused unless it is off."""
    return Option((False,), why, flag=True)


def each(option: Option, names: str) -> dict[str, Option]:
    """One option under several names, which have spaces between them."""
    return dict.fromkeys(names.split(), option)


# Reasons that several options share.
ONE_PROCESS = "ranks are divided and joined in one way"
RAY_NODES = "ranks of several machines need distributed_executor_backend ray"
NO_OFFLOAD = "weights are not moved to host memory"
NO_EXPERTS = "mixtures of experts have no options: with tensor parallelism each rank has whole experts"
WHOLE_EXPERTS = Option((True, False), "each rank has whole experts in any case", flag=True)
NO_IMAGES = "prompts are text"
NO_STATE_SPACE = "recurrent states lie in slots, with the dtype that the layer computes in"
NO_USER_CODE = "code of the user's own is not run in the engine"
NO_REASONING = "reasoning is not counted"
NO_TLS = "TLS is not served: put a proxy in front, such as Caddy, nginx or an ingress"
NO_CODE = "code from a model's repository is never run"
OWN_GRAPHS = "graphs are chosen for the model and the device"
OWN_LOADER = "there is one loader of files"
IN_SPECULATIVE_CONFIG = 'write speculative_config={"method": ..., "model": ..., "num_speculative_tokens": ...}'
IN_CONFIG_JSON = "change config.json in a copy of the model's folder"


def check_unsupported_options(
    given: Mapping[str, Any], table: Mapping[str, Option], param: str | None = None
) -> dict[str, str]:
    """Check the options in `given` that `table` lists; returns those without an effect, each with the reason.

    Args:
        param: the field whose keys they are; None: each is a field of its own.

    Raises:
        InvalidRequestError: a value that means something else than what is done; it is named.
    """
    without_effect = {}
    for name, value in given.items():
        if name not in table or value is None:
            continue
        option = table[name]
        if option.harmless is None:
            if value is not False:
                without_effect[name] = option.why
        elif not _harmless(value, option.harmless):
            what = f"{param}: {name}" if param else name
            if name != "hf_token":  # which is a secret
                what = f"{what}={value!r:.100}"
            raise InvalidRequestError(f"{what} is not supported: {option.why}", param=param or name)
    return without_effect


def reject_unsupported_options(
    who: str, given: dict[str, Any], table: Mapping[str, Option], known: Iterable[str]
) -> None:
    """Remove from `given` the keywords that are not `known`: `table` must have them, at values that change nothing.
    Those without an effect are logged.

    Raises:
        TypeError: a keyword that is in neither; `who` is the function's name for the message.
        InvalidRequestError: a value that means something else than what is done; it is named.
    """
    known = list(known)
    foreign = [name for name in given if name not in known]
    for name in foreign:
        if name not in table:
            hint = did_you_mean(name, [*known, *table]) or f"; known are {', '.join(known)}"
            raise TypeError(f"{who} got an unexpected keyword {name!r}{hint}")
    for name, why in check_unsupported_options({name: given.pop(name) for name in foreign}, table).items():
        logger.warning("%s has no effect: %s", name, why)


def accepts_unsupported_options(
    table: Mapping[str, Option], keeps_none: Collection[str] = ()
) -> Callable[[type[T]], type[T]]:
    """Decorator of a dataclass: its constructor takes the fields of `table` at values that change nothing, and None for
    the default of any field but `keeps_none`."""

    def decorate(cls: type[T]) -> type[T]:
        own = cls.__init__
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]

        @functools.wraps(own)
        def init(self: T, *args: Any, **fields: Any) -> None:
            reject_unsupported_options(f"{cls.__name__}()", fields, table, known)
            own(
                self,
                *args,
                **{name: value for name, value in fields.items() if value is not None or name in keeps_none},
            )

        cls.__init__ = init  # type: ignore[assignment]
        return cls

    return decorate


def _harmless(value: Any, harmless: tuple[object, ...]) -> bool:
    plain = getattr(value, "value", value)  # of an enum
    try:
        return bool(plain in harmless)
    except (TypeError, ValueError):  # an array
        return False
