"""Audit of changes made over HTTP; `tenancy.database.audit` writes the rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.requests import Request

from ...core.errors import OutriderError
from ..serving_state import principal_of, serving_of

if TYPE_CHECKING:
    from ...tenancy.database.audit import Actor

logger = logging.getLogger(__name__)


def actor_of(request: Request) -> Actor:
    """The key behind a request, and the client's address."""
    from ...tenancy.database.audit import Actor  # needs the database's packages

    principal = principal_of(request)
    client = request.client.host if request.client else ""
    return Actor(key_id=principal.key_id, tenant=principal.tenant, client=client)


async def audit(request: Request, action: str) -> None:
    """Record a change that was not made in the database; nothing happens without tenants."""
    tenancy = serving_of(request).tenancy
    if tenancy is None:
        return
    try:
        await tenancy.database.run(tenancy.store.by(actor_of(request)).note, action)
    except OutriderError as error:  # the log has its line
        logger.error("a change is not in the database's audit: %s", error.message)
