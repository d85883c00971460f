"""vLLM's import paths: `from outrider.lora.request import LoRARequest` finds what `from outrider import ...` finds.

They are modules without files, made at their first import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_METRICS = ".platform.client.metrics: Counter Gauge Histogram Metric Vector"
_OUTPUTS = ".platform.core.outputs: CompletionOutput Logprob RequestMetrics RequestOutput"
_POOLED = (
    ".platform.core.pooling: ClassificationOutput ClassificationRequestOutput EmbeddingOutput EmbeddingRequestOutput "
    "PoolingOutput PoolingParams PoolingRequestOutput ScoringOutput ScoringRequestOutput"
)
_SAMPLING = "RepetitionDetectionParams RequestOutputKind SamplingParams StructuredOutputsParams"
_BEAMS = ".platform.core.beam_search: BeamSearchOutput BeamSearchParams BeamSearchSequence"

PATHS: dict[str, tuple[str, ...]] = {
    "beam_search": (_BEAMS,),
    "engine.arg_utils": (".: AsyncEngineArgs EngineArgs",),
    "engine.async_llm_engine": (".: AsyncLLMEngine",),
    "engine.llm_engine": (".: LLMEngine",),
    "entrypoints.llm": (".: LLM",),
    "inputs": (".: TextPrompt TokensPrompt",),
    "logprobs": (_OUTPUTS,),
    "lora.request": (".: LoRARequest",),
    "outputs": (_OUTPUTS, _POOLED),
    "pooling_params": (".: PoolingParams",),
    "sampling_params": (f".: {_SAMPLING}", _BEAMS),
    "v1.engine.async_llm": (".: AsyncLLM",),
    "v1.engine.llm_engine": (".: LLMEngine",),
    "v1.metrics.reader": (_METRICS,),
}
"""Paths below the package -> the modules that have their names. "." is the package itself."""


class _Paths(MetaPathFinder, Loader):
    """Finder and loader of the modules of `PATHS` and of the packages around them."""

    def __init__(self, package: str) -> None:
        self._sources: dict[str, dict[str, str]] = {}  # module -> name -> where it comes from
        for path, sources in PATHS.items():
            parents = path.split(".")[:-1]
            for depth in range(1, len(parents) + 1):
                self._sources.setdefault(f"{package}." + ".".join(parents[:depth]), {})
            names = self._sources[f"{package}.{path}"] = {}
            for source in sources:
                module, _, of_module = source.partition(":")
                names |= dict.fromkeys(of_module.split(), package + module.rstrip("."))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib. Modules with files have been found before."""
        if fullname not in self._sources:
            return None
        return ModuleSpec(fullname, self, origin="alias", is_package=not self._sources[fullname])

    def exec_module(self, module: ModuleType) -> None:
        """See importlib. Names are looked up when they are used."""
        sources = self._sources[module.__name__]
        module.__doc__ = "Names of vLLM's module."

        def lookup(name: str) -> Any:
            if name not in sources:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            __import__(sources[name])
            return getattr(sys.modules[sources[name]], name)

        module.__dict__.update(__getattr__=lookup, __all__=sorted(sources))


def add_paths(package: str) -> None:
    """Let `PATHS` be imported below `package`."""
    sys.meta_path.append(_Paths(package))
