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
    NOTHING,
    chosen_file,
    overriding_defaults,
    sampling_defaults,
)
from ..core.adapter_files import GENERATION_CONFIG
from ..core.errors import InvalidRequestError
from ..core.lora_request import LoRA, LoRARequest
from .adapters.sources import AdapterSources
from .waiting import Steps, dual


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
        """Read the file in the model's folder, unless another is chosen.

        Raises:
            InvalidRequestError: it has a wrong value.
        """
        if self._choice == AUTOMATIC:
            try:
                self.of_model = {**sampling_defaults(Path(folder) / GENERATION_CONFIG), **self._override}
            except InvalidRequestError as error:
                hint = "; with generation_config none the file is not read"
                raise InvalidRequestError(error.message + hint, param=error.param) from error

    @dual
    def of(self, lora: LoRA | None) -> Steps[dict[str, Any]]:
        """Fields of `SamplingParams` for a request of this adapter, whose folder is local.

        Raises:
            AdapterError: the adapter's file has a wrong value.
        """
        requests = [] if lora is None else [lora] if isinstance(lora, LoRARequest) else [p.request for p in lora.parts]
        if len(requests) != 1 or self._choice in NOTHING:
            return self.of_model
        of_adapter = yield from self._sources.sampling_defaults(requests[0].folder)
        return {**self.of_model, **of_adapter, **self._override}
