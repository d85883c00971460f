"""Names that become metric labels: a bounded number of them, since users choose them and a series is never removed."""

from __future__ import annotations

OTHER = "other"
"""Label of all names beyond the bound."""
DEFAULT_TENANT = "default"
"""Label of requests without a tenant."""
MAX_TENANTS = 100
"""Tenants with a label value of their own."""
MAX_ADAPTERS = 200
"""Adapters with a label value of their own, loaded or not: each has some 70 series for its requests alone."""
MAX_MIXES = 50
"""Mixes of adapters with a label value of their own."""


class LabelValues:
    """Label values: the first `limit` names keep theirs, since a counter that moved between labels would
    fall."""

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


class AdapterLabels:
    """Labels of requests' adapters. Mixes ("a+b") have a bound of their own: any client may make new ones, which must
    not use up the labels of adapters."""

    def __init__(self, max_adapters: int = MAX_ADAPTERS, max_mixes: int = MAX_MIXES) -> None:
        self._adapters, self._mixes = LabelValues(max_adapters), LabelValues(max_mixes)

    def __call__(self, label: str) -> str:
        """`label`, or `OTHER` when there are too many. An adapter with a plus in its name counts as a mix, which
        changes no count."""
        return (self._mixes if "+" in label else self._adapters)(label)
