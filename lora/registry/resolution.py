"""From what a request names to the version that it is bound to: of an adapter, or of a mix of adapters."""

from __future__ import annotations

from collections.abc import Callable

from ...platform.core.lora_request import LoRA, LoRAMix, LoRARequest
from ..files.folder import AdapterFiles
from ..tiers.residency import Residency
from .registry import AdapterRegistry
from .versions import AdapterVersion, VersionPart


class Resolver:
    """Finds versions, and registers names on first use."""

    def __init__(
        self, files: AdapterFiles, registry: AdapterRegistry, residency: Residency, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called after every change of the registry's."""
        self._files = files
        self._registry = registry
        self._residency = residency
        self._on_change = on_change

    def version_of(self, lora: LoRA) -> AdapterVersion:
        """Version that a new request for `lora` is bound to.

        A registered content stays the registered one when its files change: read again, they are refused. A request
        that names other folders replaces it once these have been read. A mix has a version for as long as each of its
        parts has the version that it was made of.

        Raises:
            AdapterError: a path is not a folder; nothing has changed.
        """
        if isinstance(lora, LoRARequest):
            return self._adapter(lora)
        known = self._find_mix(lora)
        if known is not None and known.digest in self._residency.host:
            return known  # whatever became of its parts' files
        for part in lora.parts:
            self._files.check(self._files.source(part.request))
        parts = tuple(VersionPart(self._adapter(part.request), part.weight) for part in lora.parts)
        return self._registry.mix(lora.name, parts)

    def _find_mix(self, mix: LoRAMix) -> AdapterVersion | None:
        parts = []
        for request, weight in mix.parts:
            version = self._registry.match(request.name, self._files.source(request))
            if version is None:
                return None
            parts.append(VersionPart(version, weight))
        return self._registry.find_mix(tuple(parts))

    def _adapter(self, request: LoRARequest) -> AdapterVersion:
        source = self._files.source(request)
        version = self._registry.match(request.name, source)
        if version is None:
            self._files.check(source)
            version = self._registry.introduce(request.name, source)
            self._residency.update_pins()
            self._on_change()
        return version
