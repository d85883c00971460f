"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...client.text.no_tokenizer import OPTION, needed
from ...client.text.vocabulary import read_vocabulary
from ...core.errors import InvalidRequestError, invalid
from ...core.lora_request import LoRA
from ...core.sampling_params import quote_for_error
from ..adapters.adapter_choice import adapter_of_model
from ..body.reader import documented, read_body
from ..protect.accounting import charge_call
from ..serving_state import Serving, principal_of, serving_of
from .chat_messages import normalize_messages
from .json_pieces import json_answer
from .protocol import DetokenizeRequest, TokenizeRequest
from .tools.choice import parse_tool_choice

router = APIRouter()

DETOKENIZE_CONTEXTS = 4
"""Largest number of ids for `/detokenize`, as a multiple of max_model_len: more than a sequence can have, and little
work."""


async def visible_adapter(request: Request, model: str | None) -> LoRA | None:
    """Adapter of a route's `model`, which its tenant may see; None for the base model."""
    models = serving_of(request).models.seen_by(principal_of(request))
    await models.discover(model)
    return adapter_of_model(models, model)


@router.post("/tokenize", response_model=None, openapi_extra=documented(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of messages under the chat template."""
    serving = serving_of(request)
    body = await read_body(request, TokenizeRequest)
    await charge_call(request)
    lora = await visible_adapter(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either prompt or messages", param="prompt")
    if body.messages is not None:
        body.tools = list(parse_tool_choice(body).tools)
        tokens = await serving.chat_prompt(normalize_messages(body.messages), body, lora)
    else:
        special = body.add_special_tokens is None or body.add_special_tokens
        tokens = await serving.encode(body.prompt or "", add_special_tokens=special, lora=lora)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": serving.llm.info.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        tokenizer = (await serving.llm.requests.processor_of(lora)).tokenizer
        answer["token_strs"] = await asyncio.to_thread(tokenizer.convert_ids_to_tokens, tokens)
    return await json_answer(answer)


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Fields of `/tokenizer_info` that are texts of special tokens, or null."""


@router.get("/tokenizer_info", response_model=None)
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    """Special tokens and chat template of the base model's tokenizer, or of an adapter's: `model` in the query."""
    serving = serving_of(request)
    await charge_call(request)
    lora = await visible_adapter(request, model)
    tokenizer = needed((await serving.llm.requests.processor_of(lora)).tokenizer, "/tokenizer_info", OPTION)
    own = await serving.chat_template(lora, serving.config.chat_template) or tokenizer.chat_template
    return await json_answer(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": serving.llm.info.max_model_len,
            **{name: getattr(tokenizer, name, None) for name in _SPECIAL},
            "chat_template": own.get("default") if isinstance(own, dict) else own,
        }
    )


def num_text_ids(serving: Serving, tokenizer: Any) -> int:
    """Bound of the token ids that may be made text; an adapter's tokenizer may have more than the model."""
    size = serving.llm.info.vocab_size
    return size if tokenizer is serving.llm.tokenizer else max(size, len(tokenizer))


@router.post("/detokenize", response_model=None, openapi_extra=documented(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Text of at most 4 x max_model_len token ids."""
    serving = serving_of(request)
    body = await read_body(request, DetokenizeRequest)
    await charge_call(request)
    lora = await visible_adapter(request, body.model)
    tokenizer = needed((await serving.llm.requests.processor_of(lora)).tokenizer, "/detokenize", "tokens")
    size, limit = num_text_ids(serving, tokenizer), DETOKENIZE_CONTEXTS * serving.llm.info.max_model_len
    if len(body.tokens) > limit:
        raise invalid(
            "tokens", f"has {len(body.tokens)} ids; at most {limit} are taken ({DETOKENIZE_CONTEXTS} x max_model_len)"
        )
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < size):
        i = next(i for i, token in enumerate(body.tokens) if not 0 <= token < size)
        message = f"{quote_for_error(body.tokens[i])} is not a token id: they go from 0 to {size - 1}"
        raise InvalidRequestError(message, param=f"tokens[{i}]")
    text = await asyncio.to_thread(read_vocabulary(tokenizer).decode, body.tokens)
    return await json_answer({"prompt": text})
