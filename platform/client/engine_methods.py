"""Methods of `LLM`, `LLMEngine` and `AsyncLLM` about the engine itself: its facts, its metrics, and its profiler."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..core.errors import InvalidRequestError
from ..core.messages import EngineInfo, EngineStats
from ..core.sampling_params import SamplingParams, check_text
from .metrics import Metric, metrics_of
from .output_processor import OutputProcessor
from .sampling_defaults import SamplingDefaults
from .text.no_tokenizer import OPTION, needed

if TYPE_CHECKING:
    from .llm_engine import LLMEngine
    from .process.supervisor import EngineProcess

PROFILE_VARIABLES = ("OUTRIDER_PROFILE_DIR", "VLLM_TORCH_PROFILER_DIR")
"""Environment variables that name the folder of profiles."""


def _profile_folder(folder: str | os.PathLike[str] | None) -> str:
    named = folder if folder is not None else next(filter(None, map(os.environ.get, PROFILE_VARIABLES)), None)
    if named is None:
        raise InvalidRequestError(
            f"the profile needs a folder: give one, or set the variable {PROFILE_VARIABLES[0]}", param="folder"
        )
    path = os.path.abspath(os.path.expanduser(os.fspath(named)))
    check_text("folder", path)
    return path


class SyncEngineMethods:
    """Methods of `LLM` and `LLMEngine`."""

    llm_engine: LLMEngine

    @property
    def engine_info(self) -> EngineInfo:
        """Model, dtype and limits of the engine."""
        return self.llm_engine.engine_core.info

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with the defaults of the model's generation_config.json, or of the file that the option
        `generation_config` names."""
        return SamplingParams(**self.llm_engine.sampling_defaults.of_model)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            InvalidRequestError: there is none: `skip_tokenizer_init`.
        """
        return needed(self.llm_engine.tokenizer, "get_tokenizer()", OPTION)

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self.llm_engine.engine_core.stats()

    def get_metrics(self) -> list[Metric]:
        """Metrics as vLLM's `LLM.get_metrics` gives them, with its names: `Counter`, `Gauge`, `Vector`, `Histogram`.

        Counts of drafts have a label `adapter`, "" for the base model.
        """
        return metrics_of(self.engine_info.model, self.stats(), self.llm_engine.output_processor.totals)

    def start_profile(self, folder: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        """Record the engine's steps with torch's profiler until `stop_profile`.

        Args:
            folder: where the files are written; None: as the variable OUTRIDER_PROFILE_DIR says, or vLLM's
                VLLM_TORCH_PROFILER_DIR.
            prefix: beginning of the files' names.

        Raises:
            InvalidRequestError: no folder is named, or it cannot be made.
            InvalidUserInputError: a profile is being recorded.
        """
        self.llm_engine.check_open()
        self.llm_engine.engine_core.start_profile(_profile_folder(folder), prefix)

    def stop_profile(self) -> str:
        """Write a trace for Perfetto or chrome://tracing, and a table of operations (.txt); returns the trace's path.

        Raises:
            InvalidUserInputError: nothing is being recorded.
        """
        self.llm_engine.check_open()
        return self.llm_engine.engine_core.stop_profile()


class AsyncEngineMethods:
    """Methods of `AsyncLLM`."""

    sampling_defaults: SamplingDefaults

    if TYPE_CHECKING:

        async def start(self) -> EngineInfo: ...

        def _ready_engine(self) -> EngineProcess: ...

        @property
        def tokenizer(self) -> Any: ...

        @property
        def output_processor(self) -> OutputProcessor: ...

    async def check_health(self) -> None:
        """Raise the error that a request would get: the engine is being started again, sleeps or is given up."""
        await self.start()
        self._ready_engine()

    async def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        await self.start()
        return SamplingParams(**self.sampling_defaults.of_model)

    async def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        await self.start()
        return needed(self.tokenizer, "get_tokenizer()", OPTION)

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters; they start anew when the engine has been started again."""
        await self.start()
        stats: EngineStats = await self._ready_engine().call("stats")
        return stats

    async def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        info = await self.start()
        return metrics_of(info.model, await self.stats(), self.output_processor.totals)

    async def start_profile(self, folder: str | os.PathLike[str] | None = None, prefix: str = "") -> None:
        """See `LLM.start_profile`; it is the engine's process that is profiled."""
        await self.start()
        await self._ready_engine().call("start_profile", folder=_profile_folder(folder), prefix=prefix)

    async def stop_profile(self) -> str:
        """See `LLM.stop_profile`."""
        await self.start()
        path: str = await self._ready_engine().call("stop_profile")
        return path
