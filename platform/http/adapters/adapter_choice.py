"""Choice of the adapter, or weighted sum of adapters, of a completion or chat request."""

from __future__ import annotations

from typing import NamedTuple

from ...core.adapter_names import public_text
from ...core.errors import InvalidRequestError, NotFoundError, invalid
from ...core.lora_request import MAX_PARTS, LoRA, LoRARequest, mix_of, split_mix
from ...core.text import shorten
from ..observe.request_log import current_log
from ..openai.protocol import ModelFields
from .model_view import ModelView

MAX_ADAPTER_NAME = 256
"""Longest name of an adapter, in characters."""
_MAX_HINTED = 64
"""Longest name that an error repeats in a hint."""


class ChosenAdapter(NamedTuple):
    """The adapters of a request."""

    lora: LoRA | None
    model: str
    """Name in the answer's `model`, as the client wrote it."""


async def discover_adapters(models: ModelView, body: ModelFields) -> None:
    """Find those of the named adapters that are not loaded; call it before `choose_adapter`."""
    log = current_log()
    if log is not None:
        log.model_field = "model" if body.adapters is None else "adapters"
    parts = [part if isinstance(part, str) else part.name for part in body.adapters or ()]
    await models.discover(body.model, parts)


def choose_adapter(models: ModelView, body: ModelFields) -> ChosenAdapter:
    """The adapter, or sum of adapters, that `model` or `adapters` asks for.

    Raises:
        NotFoundError: a model or adapter does not exist; the message has its name.
        InvalidRequestError: an adapter in both, too many, or a weight that cannot be served.
    """
    chosen = _choose(models, body)
    log = current_log()
    if log is not None:
        log.model = shorten(chosen.model)
    return chosen


def _choose(models: ModelView, body: ModelFields) -> ChosenAdapter:
    if body.adapters is None:
        return ChosenAdapter(adapter_of_model(models, body.model), body.model or models.base_name)
    if adapter_of_model(models, body.model) is not None:
        raise InvalidRequestError(
            "adapters and a model that is an adapter exclude each other; name the base model, or give no adapters",
            param="adapters",
        )
    if not 1 <= len(body.adapters) <= MAX_PARTS:
        raise invalid("adapters", f"must name 1 to {MAX_PARTS} adapters, got {len(body.adapters)}")
    parts = [(part, 1.0) if isinstance(part, str) else (part.name, part.weight) for part in body.adapters]
    lora = mix_of([(_part(models, name, "adapters"), weight) for name, weight in parts], param="adapters")
    return ChosenAdapter(lora, models.base_name if lora is None else public_text(lora.name))


def adapter_of_model(models: ModelView, model: str | None) -> LoRA | None:
    """The adapter that `model` asks for by itself. A registered name wins, whatever is in it. Errors: see
    `choose_adapter`."""
    try:
        return models.resolve(model)
    except NotFoundError as error:
        assert model is not None
        if models.was_adapter(model):
            raise
        try:
            parts = split_mix(model, models.is_adapter)
        except InvalidRequestError as wrong:
            raise InvalidRequestError(f"model: {wrong.message}", param="model") from None
        if parts is None:
            raise NotFoundError(error.message + (_hint(model) or models.suggestion(model)), param="model") from None
    return mix_of([(_part(models, name, "model"), weight) for name, weight in parts], param="model")


def _hint(name: str) -> str:
    """Advice on writing weights, for a name that ends like one."""
    base, colon, number = name.removeprefix("+").rpartition(":")
    if not (base and colon and len(name) <= _MAX_HINTED and number.replace(".", "", 1).isdecimal()):
        return ""
    return f" (a weight has a decimal point and is part of a sum, such as '+{base}:0.5')"


def _part(models: ModelView, name: str, field: str) -> LoRARequest:
    try:
        lora = models.resolve(name)
    except NotFoundError:
        message = f"{field}: the adapter {shorten(name)!r} does not exist; /v1/models lists those that do"
        raise NotFoundError(message + (_hint(name) or models.suggestion(name)), param=field) from None
    if lora is None:
        message = f"{field}: {shorten(name)!r} is the base model; only adapters have weights and can be mixed"
        raise InvalidRequestError(message, param=field)
    return lora
