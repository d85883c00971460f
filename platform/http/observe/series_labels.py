"""Labels (adapter, tenant) of counts: bounded in number, and for good the same for the same names."""

from __future__ import annotations

from ...core.adapter_names import MARK, label_text, split_engine_name
from ...core.labels import DEFAULT_TENANT, MAX_ADAPTERS, MAX_TENANTS, OTHER, AdapterLabels, LabelValues

PREFIX = "outrider:"
"""Prefix of every metric."""
MAX_OWN_ADAPTERS = 200
"""Tenants' own adapters with a label, all tenants' together."""
MAX_OWN_OF_ONE = 20
"""Labels for adapters of one tenant: it may load and unload others all day, and must not take the labels of all."""

Labels = tuple[str, ...]


class SeriesLabels:
    """Labels by the engine's names of adapters. A tenant's own adapter is "tenant/name"; those beyond the bounds are
    "tenant/other", and mixes with a tenant's own count as mixes, like all."""

    def __init__(self) -> None:
        self._adapter, self._tenant = AdapterLabels(MAX_ADAPTERS), LabelValues(MAX_TENANTS)
        self._own: dict[str, LabelValues] = {}  # by tenant
        self._all_own = LabelValues(MAX_OWN_ADAPTERS)

    def __call__(self, adapter: str, tenant: str) -> Labels:
        """Labels of a request. Requests without a tenant have a label too: an empty one is as good as none for
        Prometheus. The base model's is empty, and its own however many adapters there are."""
        return self.adapter(adapter), self.tenant(tenant)

    def tenant(self, name: str) -> str:
        """The label of a tenant; "" for none."""
        return self._tenant(name) or DEFAULT_TENANT

    def adapter(self, name: str) -> str:
        """The label of an adapter; "" is the base model."""
        if name.startswith(MARK) and "+" not in name:
            return self._own_adapter(name)
        return name and self._adapter(label_text(name))

    def _own_adapter(self, name: str) -> str:
        tenant = self._tenant(split_engine_name(name)[0])
        if tenant == OTHER:
            return OTHER
        own = self._own.setdefault(tenant, LabelValues(MAX_OWN_OF_ONE))
        label = label_text(name)
        return label if own(label) != OTHER and self._all_own(label) != OTHER else f"{tenant}/{OTHER}"
