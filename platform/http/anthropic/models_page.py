"""Anthropic's form of `GET /v1/models`: a page of models, and one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import QueryParams

from ...core.errors import invalid
from ...core.text import shorten

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000
"""Models of a page, as in Anthropic's API."""


def model_info(card: Mapping[str, Any]) -> dict[str, Any]:
    """One model, out of its card in OpenAI's form."""
    created = datetime.fromtimestamp(card["created"], UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "lifecycle": "active",
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def models_page(cards: Sequence[Mapping[str, Any]], query: QueryParams) -> dict[str, Any]:
    """The page that `limit`, `after_id` and `before_id` ask for.

    Raises:
        InvalidRequestError: one of them is wrong; `param` names it.
    """
    limit = _limit(query.get("limit"))
    start, end = 0, len(cards)
    ids = [card["id"] for card in cards]
    if "after_id" in query:
        start = _index(ids, query, "after_id") + 1
    if "before_id" in query:
        end = _index(ids, query, "before_id")
        start = max(start, end - limit)  # the last ones before it
        has_more = start > 0
    else:
        has_more = end - start > limit
    data = [model_info(card) for card in cards[start : min(end, start + limit)]]
    return {
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise invalid("limit", f"must be a whole number in [1, {MAX_LIMIT}], got {shorten(text)}")
    return int(text)


def _index(ids: Sequence[str], query: QueryParams, field: str) -> int:
    if query[field] not in ids:
        raise invalid(field, f"there is no model {shorten(repr(query[field]))}")
    return ids.index(query[field])
