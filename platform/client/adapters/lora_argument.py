"""Ways to name an adapter in a request.

None                            the base model
LoRARequest, or its name        an adapter
(adapter, 0.5)                  an adapter with a scale
[(a, 0.7), (b, 0.3)]            a weighted sum of adapters
LoRAMix, "a:0.7+b:0.3"          the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any, TypeAlias, TypeVar

from ...core.errors import InvalidRequestError, NotFoundError, invalid
from ...core.lora_request import LoRA, LoRAMix, LoRARequest, mix_of, split_mix
from ...core.sampling_params import quote_for_error

AnyLoRA: TypeAlias = LoRA | str | tuple[LoRARequest | str, float] | Sequence[tuple[LoRARequest | str, float]]
"""One request's adapter, named in any way but None."""

T = TypeVar("T")

_MAX_SHOWN_NAMES = 20


def resolve_lora(lora: AnyLoRA | None, known: Callable[[], Mapping[str, LoRARequest]]) -> LoRA | None:
    """Return the adapter of a request. `known` are the adapters that a name may mean, read only for a name.

    Raises:
        NotFoundError: no adapter has that name.
        InvalidRequestError: it names no adapter, or no mix that can be served.
    """
    if lora is None or isinstance(lora, LoRARequest):
        return lora
    if isinstance(lora, str):
        return _resolve_name(lora, known())
    if isinstance(lora, LoRAMix):
        return mix_of(_resolve_parts(lora.parts, known))
    if _is_part(lora):
        return mix_of(_resolve_parts([lora], known))
    if isinstance(lora, (list, tuple)) and lora and all(map(_is_part, lora)):
        return mix_of(_resolve_parts(lora, known))
    raise invalid(
        "lora_request",
        "must be a LoRARequest or a name, one with a scale as (adapter, 0.5), or several as [(a, 0.7), (b, 0.3)]; "
        f"got {quote_for_error(lora)}",
    )


def lora_of_each(value: Any, count: int) -> list[Any]:
    """The adapters of `count` prompts, each still as it was given: a list has one entry a prompt, unless all of its
    entries are adapters with weights. That is one mix, for every prompt."""
    is_mix = isinstance(value, Sequence) and bool(value) and all(map(_is_part, value))
    if is_mix or isinstance(value, LoRAMix) or _is_part(value):
        return [value] * count
    return for_each("lora_request", value, count, None)


def for_each(name: str, value: Any, count: int, default: T) -> list[T]:
    """`value` for each of `count` prompts: a list as it is, None as the default, anything else repeated."""
    if value is None:
        return [default] * count
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise invalid(name, f"has {len(value)} entries for {count} prompts")
        return list(value)
    return [value] * count


def _is_part(value: Any) -> bool:
    """True for an adapter and a weight, however wrong the weight."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], LoRARequest | str):
        return False
    return not isinstance(value[1], LoRARequest | str | tuple | list | None)


def _resolve_parts(parts: Any, known: Callable[[], Mapping[str, LoRARequest]]) -> Iterable[tuple[LoRARequest, Any]]:
    if not isinstance(parts, (list, tuple)) or not all(map(_is_part, parts)):
        raise InvalidRequestError(
            f"lora_request: the parts of a mix are pairs of an adapter and a weight, got {quote_for_error(parts)}",
            param="lora_request",
        )
    for adapter, weight in parts:
        yield (_named(adapter, known()) if isinstance(adapter, str) else adapter), weight


def _resolve_name(name: str, known: Mapping[str, LoRARequest]) -> LoRA | None:
    if name in known:
        return known[name]
    parts = split_mix(name, known.__contains__)
    if parts is None:
        return _named(name, known)
    return mix_of([(_named(part, known), weight) for part, weight in parts])


def _named(name: str, known: Mapping[str, LoRARequest]) -> LoRARequest:
    if name not in known:
        names = ", ".join(nsmallest(_MAX_SHOWN_NAMES, known)) or "none"
        if len(known) > _MAX_SHOWN_NAMES:
            names += f" and {len(known) - _MAX_SHOWN_NAMES} more"
        raise NotFoundError(f"the adapter {name!r} is not loaded; loaded are: {names}", param="lora_request")
    return known[name]
