"""The exposition with vLLM's names of metrics beside our own, for its benchmark client and for dashboards."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ...core.compat.vllm_metrics import VLLM_PREFIX, vllm_names
from .series_labels import PREFIX


class WithVllmNames(Collector):
    """All families of a registry, and a copy under vLLM's name of each that vLLM has. The copies have vLLM's labels
    `model_name` and `engine` beside ours."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        for family in self._registry.collect():
            yield family
            for name in vllm_names(family.name.removeprefix(PREFIX)):
                yield self._renamed(family, VLLM_PREFIX + name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        copy = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            copy.samples.append(Sample(name + suffix, {**self._labels, **sample.labels}, sample.value))
        return copy
