"""Names that become metric labels: a bounded number of them, since users choose them and a series never goes away."""

from __future__ import annotations

OTHER = "other"
"""Stands for all names beyond the bound."""
MAX_TENANTS = 100
"""Tenants with a label value of their own."""
MAX_ADAPTERS = 200
"""Adapters with one, loaded or not: each has some 70 series for its requests alone."""


class LabelValues:
    """The first `limit` different names keep theirs, for good: a counter that moved between labels would fall."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def __call__(self, name: str) -> str:
        """`name`, or `OTHER` when there are too many."""
        if name in self._names:
            return name
        if len(self._names) >= self._limit:
            return OTHER
        self._names.add(name)
        return name
