"""Helpers of the routes below `/admin/v1`: the database, the documented errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from ...tenancy.database.connection import DatabaseUnavailableError
from ...tenancy.database.store import Store
from ...tenancy.service import Tenancy
from ..protect.audit_log import actor_of
from ..serving_state import serving_of
from .admin_schema import ErrorBody

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A field is wrong; `param` names it"},
    401: {"model": ErrorBody, "description": "No key, or one that is not valid"},
    403: {"model": ErrorBody, "description": "The key has not the scope `admin`"},
    404: {"model": ErrorBody, "description": "There is nothing of that name"},
    "4XX": {"model": ErrorBody, "description": "The request is refused for another reason"},
    503: {"model": ErrorBody, "description": "The database does not answer"},
}


def tenancy_of(request: Request) -> Tenancy:
    """The server's tenants. A server without them does not have the routes of this package."""
    tenancy = serving_of(request).tenancy
    assert tenancy is not None
    return tenancy


async def query(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, which only reads the database."""
    return await tenancy_of(request).database.run(work, *args, **kwargs)


async def change(request: Request, work: Callable[[Store], T]) -> T:
    """Call `work`, which changes the database in the caller's name, and notify this server before the answer
    is sent."""
    tenancy = tenancy_of(request)
    result = await tenancy.database.run(work, tenancy.store.by(actor_of(request)))
    try:
        await tenancy.directory.refresh()
    except DatabaseUnavailableError as error:  # the change is made, and is seen as soon as the database is back
        logger.warning("a change could not be read back: %s", error.message)
    return result
