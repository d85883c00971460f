"""Who changed what: the lines of `outrider.audit`."""

from __future__ import annotations

import logging

from starlette.requests import Request

from .serving import principal_of

audit_logger = logging.getLogger("outrider.audit")
audit_logger.setLevel(logging.INFO)  # whatever --log-level says: who changed what must be found later


def audit(request: Request, action: str) -> None:
    """Write down a change that has been made; `action` stands after "key-… (operators)": "created tenant acme"."""
    principal = principal_of(request)
    who = f"{principal.key_id} ({principal.tenant})" if principal.key_id else "the server's own admin key"
    client = request.client.host if request.client else "unknown"
    extra = {"key_id": principal.key_id, "tenant": principal.tenant, "client": client, "action": action}
    audit_logger.info("%s, from %s, %s", who, client, action, extra=extra)
