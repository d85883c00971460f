"""Engine names of tenants' adapters.

Two tenants may each have an adapter "support", and neither may reach the other's, so the engine's name of a tenant's
own adapter is one that no request can contain: the tenant's between two marks, then its own. The mark is a control
character, which no name of an adapter may have. Shared adapters have their plain names.

Users see plain names in answers and errors, and "tenant/name" in labels and logs, which cover all tenants.
"""

from __future__ import annotations

import re

MARK = "\x1f"
"""Unit separator. Names with it are refused wherever users write them."""

# As in a text, or in the `repr` of one.
_OWNED = re.compile(r"(?:\x1f|\\x1f)([a-z0-9._-]*)(?:\x1f|\\x1f)")


def engine_name(tenant: str, name: str) -> str:
    """The engine's name of an adapter; `tenant` is "" for one that all share."""
    return f"{MARK}{tenant}{MARK}{name}" if tenant else name


def split_engine_name(name: str) -> tuple[str, str]:
    """(tenant, name) of an engine's name; the tenant is "" for one that all share."""
    if not name.startswith(MARK):
        return "", name
    tenant, _, public = name[1:].partition(MARK)
    return tenant, public


def public_text(text: str) -> str:
    """A text for the tenant itself, such as an error: adapters have the tenant's own names in it."""
    return _OWNED.sub("", text) if "x1f" in text or MARK in text else text


def label_text(text: str) -> str:
    """A text for operators, who see all tenants: adapters are "tenant/name" in it."""
    return _OWNED.sub(r"\1/", text) if "x1f" in text or MARK in text else text
