"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.errors import invalid


def page(items: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """The page that begins after the item with the id `after`, or at the first one.

    Raises:
        InvalidRequestError: no item has that id.
    """
    start = 0
    if after is not None:
        start = next((index for index, item in enumerate(items, 1) if item["id"] == after), 0)
        if not start:
            raise invalid("after", "is no id of this list")
    shown = list(items[start : start + limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > start + limit,
    }
