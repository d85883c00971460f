"""Marks of reasoning for requests that bound it (`thinking_token_budget`)."""

from __future__ import annotations

from typing import Any

from ...core.errors import invalid
from ...core.lora_request import LoRA
from ...core.sampling_params import SamplingParams
from ..serving_state import Serving
from .tools.formats import find_template

_FIELD = "thinking_token_budget"


async def add_marks(
    serving: Serving, params: SamplingParams, lora: LoRA | None, template: dict[str, Any] | None = None
) -> None:
    """Add the tokens that begin and end the reasoning to `params`, if they bound it and have no such tokens: those of
    the server's --reasoning-parser, or of the format that the model's chat template gives away.

    Args:
        template: Response template of the model's format, if it is known.

    Raises:
        InvalidRequestError: the format has no such marks, or they are no tokens of the model.
    """
    if params.thinking_token_budget is None or params.thinking_end_token_ids is not None:
        return
    tokenizer = (await serving.llm.requests.processor_of(lora)).tokenizer
    if tokenizer is None:
        return  # the request's check says what is missing
    if template is None:
        name = serving.config.reasoning_parser
        template = find_template(name, tokenizer, await serving.chat_template(lora) if name is None else None)
    if template is None:
        return
    marks = template["fields"].get("reasoning_content") or {}
    for name, field in (("open", "thinking_start_token_ids"), ("close", "thinking_end_token_ids")):
        mark = marks.get(name)
        if not isinstance(mark, str):
            raise invalid(_FIELD, "is not available: in this format reasoning ends without a mark of its own")
        setattr(params, field, tokens_of_mark(tokenizer, mark))


def tokens_of_mark(tokenizer: Any, mark: str) -> list[int]:
    """Tokens of a mark, which must be one token: as text it could be written in several ways.

    Raises:
        InvalidRequestError: it is no token.
    """
    token_ids = list(tokenizer.encode(mark, add_special_tokens=False))
    if len(token_ids) != 1:
        raise invalid(
            _FIELD,
            f"is not available: the mark {mark!r} of reasoning is no token of this model; give "
            "thinking_start_token_ids and thinking_end_token_ids",
        )
    return token_ids
