"""Sampling parameters of requests that leave them out.

A request's own parameter comes first, then the option `override_generation_config`, then its adapter's
generation_config.json, then the model's (or the one that the option `generation_config` names), then the default of
`SamplingParams`. A weighted sum of several adapters takes the model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...models.checkpoint.generation_config import (
    AUTOMATIC,
    FILE,
    NOTHING,
    chosen_file,
    overriding_defaults,
    sampling_defaults,
)
from ..core.errors import InvalidRequestError
from ..core.lora_request import LoRA, LoRARequest
from .adapters.sources import AdapterSources


class SamplingDefaults:
    """The defaults of one model and its adapters."""

    def __init__(self, choice: str, sources: AdapterSources, override: dict[str, Any] | None = None) -> None:
        """`choice` is the option `generation_config`, `override` is `override_generation_config`.

        Raises:
            InvalidRequestError: the option names a file that is not there, or a value is wrong.
        """
        self._override = {} if override is None else overriding_defaults(override)
        self._choice = choice
        self._sources = sources
        file = chosen_file(choice)
        self.of_model: dict[str, Any] = {**({} if file is None else sampling_defaults(file)), **self._override}
        """Fields of `SamplingParams`; of the model's own file after `read_model`."""

    def read_model(self, folder: str) -> None:
        """Read the file in the model's folder, where no other is chosen.

        Raises:
            InvalidRequestError: it has a wrong value.
        """
        if self._choice == AUTOMATIC:
            try:
                self.of_model = {**sampling_defaults(Path(folder) / FILE), **self._override}
            except InvalidRequestError as error:
                hint = "; with generation_config none the file is not read"
                raise InvalidRequestError(error.message + hint, param=error.param) from error

    async def of(self, lora: LoRA | None) -> dict[str, Any]:
        """Fields of `SamplingParams` for a request of this adapter, whose folder is local.

        Raises:
            AdapterError: the adapter's file has a wrong value.
        """
        folder = self._folder(lora)
        return self._with({} if folder is None else await self._sources.sampling_defaults(folder))

    def of_now(self, lora: LoRA | None) -> dict[str, Any]:
        """`of` without asyncio: the call waits for the file."""
        folder = self._folder(lora)
        return self._with({} if folder is None else self._sources.sampling_defaults_now(folder))

    def _with(self, of_adapter: dict[str, Any]) -> dict[str, Any]:
        return {**self.of_model, **of_adapter, **self._override}

    def _folder(self, lora: LoRA | None) -> str | None:
        if lora is None or self._choice in NOTHING:
            return None
        if isinstance(lora, LoRARequest):
            return lora.path
        return lora.parts[0].request.path if len(lora.parts) == 1 else None
