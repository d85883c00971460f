"""Verbs of an engine apart from its requests and adapters, most of which stop it for a time: `EngineLife` of `LLM` and
`LLMEngine`, `AsyncEngineLife` of `AsyncLLM`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from ..core.kv_events import KVEventSource
from .weight_updates import AppliedUpdate, check_version, weight_sources

if TYPE_CHECKING:
    from .local_engine import LocalEngine
    from .remote_engine import RemoteEngine


class EngineLife:
    """Verbs of an engine in this process."""

    _engine: LocalEngine

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`; requests and adapter calls are refused with AsleepError meanwhile.

        Args:
            level: 1 frees the KV cache; 2 the weights too, which are loaded again from their files.

        Raises:
            InvalidUserInputError: there are requests.
        """
        self._engine.sleep(level)

    def wake_up(self) -> None:
        """Take requests again, after `sleep`; the errors are those of a start."""
        self._engine.wake_up()

    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self._engine.state.sleep_level > 0

    def pause_generation(
        self, mode: str = "abort", *, clear_cache: bool = True, wait_for_inflight_requests: bool = False
    ) -> None:
        """Compute nothing until `resume_generation`, as for a change of the weights. Requests that come meanwhile wait
        for it; `LLM.generate`, which would wait for ever, is refused with InvalidUserInputError.

        Args:
            mode: for requests that run or wait now: "abort" ends them with the finish reason "abort" and what they
                generated, "wait" lets them finish first, by calls of `LLMEngine.step`, and "keep" freezes them as they
                are until the resume.
            clear_cache: if weights are replaced before the resume, all KV is dropped, and requests that are kept are
                computed again under the new ones. Without it they go on with the KV that they have.
            wait_for_inflight_requests: vLLM's older name of the mode "wait".

        Raises:
            InvalidRequestError: there is no such mode. AsleepError: the engine sleeps.
        """
        self._engine.pause("wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Compute again; does nothing without a pause. AsleepError while the engine sleeps."""
        self._engine.resume()

    def is_paused(self) -> bool:
        """True between `pause_generation` and `resume_generation`."""
        return self._engine.is_paused

    def update_weights(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        shared_memory: str | None = None,
        draft: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Replace the weights of the model in use. All are checked before any is changed: after an error the old ones
        go on. Adapters stay loaded, and cached prefixes of the old weights are not used any more.

        Args:
            path: a folder with config.json and weights, as for a start, or a safetensors file with all tensors of some
                layers.
            shared_memory: the name of such a file in /dev/shm.
            draft: replace the drafter's weights.
            weight_version: a label for `weight_version`.

        Raises:
            InvalidRequestError: they are not those of such a model, or have numbers that are not finite; a tensor is
                named. NotFoundError: files are missing. AsleepError: the engine sleeps.
            InvalidUserInputError: requests run and generation is not paused, or an adapter depends on the weights.
        """
        check_version(weight_version)
        sources = weight_sources(None if path is None else os.fspath(path), shared_memory)
        self._engine.update_weights(AppliedUpdate(sources, draft), weight_version)

    def weight_version(self) -> str:
        """Label of the weights: that of the last update with one, or "default"."""
        return self._engine.weights.version

    def kv_event_sources(self) -> list[KVEventSource]:
        """Addresses at which events of the prefix cache are published; [] without `kv_events_config`."""
        return cast(list[KVEventSource], self._engine.call("kv_event_sources"))


class AsyncEngineLife:
    """Verbs of an engine in a process of its own."""

    engine: RemoteEngine

    async def sleep(self, level: int = 1) -> None:
        """Refuse new requests with AsleepError, let the running ones finish, and free memory until `wake_up`; see
        `LLM.sleep`. Level 2 ends the engine process. InvalidUserInputError if requests wait for the end of a pause."""
        await self.engine.sleep(level)

    async def wake_up(self) -> None:
        """See `LLM.wake_up`."""
        await self.engine.wake_up()

    async def is_sleeping(self) -> bool:
        """See `LLM.is_sleeping`."""
        return self.engine.sleep_level > 0

    async def pause_generation(
        self, mode: str = "abort", *, clear_cache: bool = True, wait_for_inflight_requests: bool = False
    ) -> None:
        """See `LLM.pause_generation`. Returns once the running requests have ended, or are kept as they are; a mode
        that is called meanwhile takes the place of "wait". An engine process that is started again is paused, too.

        Raises:
            InvalidRequestError: there is no such mode. AsleepError: the engine sleeps. EngineDeadError: it died.
            InvalidUserInputError: it was resumed before the running requests had finished.
        """
        await self.engine.pause("wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """See `LLM.resume_generation`."""
        await self.engine.resume()

    async def is_paused(self) -> bool:
        """See `LLM.is_paused`."""
        return self.engine.is_paused

    async def update_weights(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        shared_memory: str | None = None,
        draft: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """See `LLM.update_weights`. An engine process that is started again reads the files again; if it cannot, it is
        given up."""
        check_version(weight_version)
        sources = weight_sources(None if path is None else os.fspath(path), shared_memory)
        await self.engine.update_weights(AppliedUpdate(sources, draft), weight_version)

    async def weight_version(self) -> str:
        """See `LLM.weight_version`."""
        return self.engine.weights.version

    async def kv_event_sources(self) -> list[KVEventSource]:
        """See `LLM.kv_event_sources`. Those of an engine process that is started again may differ."""
        return cast(list[KVEventSource], await self.engine.call("kv_event_sources"))
