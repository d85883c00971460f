"""Responses that clients may ask for later. They are kept in this process, a bounded number of bounded size for each
tenant; the least recently used one is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ....core.errors import InvalidRequestError, NotFoundError
from ....core.text import shorten

MAX_RESPONSES = 1000
"""Responses of one tenant."""
MAX_BYTES = 16 << 20
"""Bytes of one tenant's responses, each counted with its whole conversation."""
MAX_TOTAL_BYTES = 256 << 20
"""Bytes of all tenants' responses: above it, the oldest of the tenant that has most is evicted."""
_OBJECT_BYTES = 64
"""Bytes that a value takes in addition to its characters, about."""


@dataclass(slots=True)
class Stored:
    """A stored response."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    """The whole conversation before the response's output."""
    num_bytes: int = 0

    @property
    def is_running(self) -> bool:
        """True until the answer has ended."""
        return bool(self.response["status"] == "in_progress")

    def conversation(self) -> list[dict[str, Any]]:
        """All items, those of the output too."""
        return [*self.items, *self.response["output"]]


def estimate_bytes(value: Any) -> int:
    """Bytes that a JSON value takes, about."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        size += _OBJECT_BYTES
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            size += _OBJECT_BYTES * len(item)
            waiting += item.values()
    return size


class ResponseStore:
    """Responses by tenant and id."""

    def __init__(
        self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._tenants: dict[str, OrderedDict[str, Stored]] = {}
        self._bytes: dict[str, int] = {}  # by tenant

    def check(self, items: list[dict[str, Any]]) -> None:
        """Refuse a conversation that takes more than a tenant may store.

        Raises:
            InvalidRequestError: it does; the message has the limit.
        """
        size = estimate_bytes(items)
        if size > self._max_bytes:
            raise InvalidRequestError(
                f"store: the conversation takes about {size} bytes, and a tenant's stored responses at most "
                f"{self._max_bytes}; send store false",
                param="store",
            )

    def put(self, tenant: str, stored: Stored) -> None:
        """Keep a response, or replace the one with its id."""
        self._drop(tenant, stored.response["id"])
        stored.num_bytes = estimate_bytes(stored.items) + estimate_bytes(stored.response)
        self._tenants.setdefault(tenant, OrderedDict())[stored.response["id"]] = stored
        self._bytes[tenant] = self._bytes.get(tenant, 0) + stored.num_bytes
        mine = self._tenants[tenant]
        while len(mine) > self._max_responses or (len(mine) > 1 and self._bytes[tenant] > self._max_bytes):
            self._drop_oldest(tenant)
        while len(self._bytes) > 1 and sum(self._bytes.values()) > self._max_total_bytes:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def update(self, tenant: str, response: dict[str, Any]) -> None:
        """Give a stored response its later form; does nothing when it has been deleted."""
        stored = self._tenants.get(tenant, {}).get(response["id"])
        if stored is not None:
            self.put(tenant, Stored(response, stored.items))

    def get(self, tenant: str, response_id: str, param: str = "response_id") -> Stored:
        """A stored response, which counts as used.

        Raises:
            NotFoundError: there is none of this tenant.
        """
        mine = self._tenants.get(tenant, OrderedDict())
        if response_id not in mine:
            raise NotFoundError(
                f"The response {shorten(repr(response_id))} does not exist: of each tenant the last "
                f"{self._max_responses} responses of together {self._max_bytes >> 20} MiB are kept, until the server "
                "ends",
                param=param,
            )
        mine.move_to_end(response_id)
        return mine[response_id]

    def items(self, tenant: str) -> dict[str, dict[str, Any]]:
        """Items of all of a tenant's conversations by their ids."""
        mine = self._tenants.get(tenant, OrderedDict())
        return {item["id"]: item for stored in mine.values() for item in stored.conversation()}

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response. NotFoundError: see `get`."""
        self.get(tenant, response_id)
        self._drop(tenant, response_id)

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant])))

    def _drop(self, tenant: str, response_id: str) -> None:
        mine = self._tenants.get(tenant)
        stored = None if mine is None else mine.pop(response_id, None)
        if stored is not None:
            self._bytes[tenant] -= stored.num_bytes
        if not mine:
            self._tenants.pop(tenant, None)
            self._bytes.pop(tenant, None)
