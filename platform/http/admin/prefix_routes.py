"""`/admin/v1/prefixes`: prefixes of prompts that are no secret, so that all tenants share their KV."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from ...core.errors import InvalidRequestError
from ...tenancy.accounts.records import SharedPrefix
from ..body.reader import documented, read_body
from ..openai.chat_messages import normalize_messages
from ..openai.protocol import TemplateFields
from ..serving_state import Serving, serving_of
from .admin_schema import Deleted, ListOf, PrefixCreate, PrefixView
from .common import change, query, tenancy_of

router = APIRouter(prefix="/prefixes")


@router.post("", status_code=201, openapi_extra=documented(PrefixCreate))
async def add_prefix(request: Request) -> PrefixView:
    """Declare a shared prompt prefix. Its author may then find out that others have sent it, too."""
    serving = serving_of(request)
    body = await read_body(request, PrefixCreate)
    tokens = await _tokens(serving, body)
    added = await change(request, lambda store: store.add_prefix(body.name, tokens))
    await _applied(serving)
    return _view(added)


@router.get("")
async def list_prefixes(request: Request) -> ListOf[PrefixView]:
    """All shared prefixes, by name."""
    prefixes = await query(request, tenancy_of(request).store.list_prefixes)
    return ListOf(data=[_view(prefix) for prefix in prefixes])


@router.delete("/{name}")
async def remove_prefix(request: Request, name: str) -> Deleted:
    """Remove a shared prefix. Its cached KV is not found any more, and makes room."""
    await change(request, lambda store: store.remove_prefix(name))
    await _applied(serving_of(request))
    return Deleted(name=name)


def _view(prefix: SharedPrefix) -> PrefixView:
    return PrefixView(name=prefix.name, num_tokens=len(prefix.token_ids), created_at=prefix.created_at)


async def _applied(serving: Serving) -> None:
    """Wait until the change counts, as the answer says."""
    if serving.prefix_sync is not None:
        await serving.prefix_sync.applied()


async def _tokens(serving: Serving, body: PrefixCreate) -> list[int]:
    given = [field for field in ("text", "messages", "token_ids") if getattr(body, field) is not None]
    if len(given) != 1:
        raise InvalidRequestError("Give one of text, messages and token_ids", param="text")
    if body.text is not None:
        return await serving.encode(body.text, add_special_tokens=True)
    if body.messages is not None:
        return await serving.chat_prompt(normalize_messages(body.messages), TemplateFields(add_generation_prompt=False))
    assert body.token_ids is not None
    size = serving.llm.info.vocab_size
    for i, token in enumerate(body.token_ids):
        if token >= size:
            raise InvalidRequestError(
                f"{token} is not a token id: they go from 0 to {size - 1}", param=f"token_ids[{i}]"
            )
    return body.token_ids
