"""The way of a request from what users give to what the engine gets: `prepare`, then `sequences`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Unpack

from ..core.adapter_names import MARK
from ..core.constraint_check import CHECKER
from ..core.errors import NotFoundError
from ..core.lora_request import LoRA, LoRAMix, LoRAPart, LoRARequest
from ..core.messages import EngineRequest
from ..core.sampling_params import SamplingParams
from .adapters.lora_argument import AnyLoRA, resolve_lora
from .adapters.sources import AdapterSources
from .input_processor import InputProcessor
from .prepared import Defaults, ParsedPrompt, Prepared, RequestOptions
from .prompts import Prompt, has_new_constraint, is_long
from .sampling_defaults import SamplingDefaults
from .text.adapter_templates import adapter_chat_template
from .text.adapter_tokenizers import AdapterTokenizers
from .text.chat_template import ChatOptions
from .waiting import Steps, dual, wait_for


class RequestMaker:
    """Checks requests. Files are fetched and long prompts are checked in threads."""

    def __init__(
        self,
        input_processor: InputProcessor,
        known: Callable[[], Mapping[str, LoRARequest]],
        sources: AdapterSources,
        defaults: SamplingDefaults,
        loaded: Mapping[str, LoRARequest] = MappingProxyType({}),
    ) -> None:
        """`known` returns the adapters that a name may mean; `loaded` is a live view of those that users loaded."""
        self.input_processor = input_processor
        self._known = known
        self._sources = sources
        self._defaults = defaults
        self._loaded = loaded
        # Threads that check long requests in Python: an event loop waits its turn behind each that runs.
        self._checkers = ThreadPoolExecutor(2, "check-request")
        self._processors = AdapterTokenizers(input_processor.tokenizer, input_processor.with_tokenizer)

    @dual
    def prepare(
        self,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: AnyLoRA | None,
        default_max_tokens: int | None = None,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Steps[Prepared]:
        """Check a request; errors as of `InputProcessor.prepare`, `AdapterSources.localize` and `processor_of`."""
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        lora = resolve_lora(lora_request, self._known)
        parts = [part.request for part in lora.parts] if isinstance(lora, LoRAMix) else [lora]
        loaded = frozenset(part.name for part in parts if part and (part.loaded or self._loaded.get(part.name) == part))
        local = yield from self._sources.localize(lora)
        chosen = params if params is not None else Defaults((yield from self._defaults.of(local)))
        processor = yield from self.processor_of(local)
        check = functools.partial(
            processor.prepare,
            request_id,
            prompt,
            chosen,
            lora=lora,
            default_max_tokens=default_max_tokens,
            arrival_time=arrival_time,
            **options,
        )
        if has_new_constraint(params):
            prepared = yield from wait_for(CHECKER.thread.submit(check))
        elif is_long(prompt, params):
            prepared = yield from wait_for(self._checkers.submit(check))
        else:
            prepared = check()
        return replace(prepared, loaded=loaded)

    @dual
    def sequences(self, prepared: Prepared, engine_id: str) -> Steps[list[EngineRequest]]:
        """Sequences of a request that is to run now. The files of its adapter are fetched again if they have been
        removed while it waited. An adapter that was loaded is the one that has the name now.

        Raises:
            NotFoundError: it was unloaded while the request waited, and its name means no other.
        """
        lora = prepared.lora
        if isinstance(lora, LoRARequest):
            lora = yield from self._present(lora, prepared.loaded)
        elif lora is not None:
            parts = []
            for request, weight in lora.parts:
                parts.append(LoRAPart((yield from self._present(request, prepared.loaded)), weight))
            lora = LoRAMix(tuple(parts))
        return prepared.sequences(engine_id, (yield from self._sources.localize(lora)))

    def _present(self, request: LoRARequest, loaded: frozenset[str]) -> Steps[LoRARequest]:
        """The adapter of a request that waited, as its name is understood now."""
        name = request.name
        if name not in loaded:
            return request
        present = self._loaded.get(name)
        if present is None and MARK not in name and self._sources.finds_names:
            present = yield from self._sources.find(name)
        if present is None:
            raise NotFoundError(f"the adapter {name!r} was unloaded while the request waited", param="model")
        return present

    @dual
    def processor_of(self, lora_request: AnyLoRA | None) -> Steps[InputProcessor]:
        """The processor of an adapter's texts: its folder may hold a tokenizer. A weighted sum has the model's.

        Raises:
            AdapterError: the adapter's tokenizer cannot be read.
        """
        lora = yield from self._localized(lora_request)
        if not isinstance(lora, LoRARequest):
            return self.input_processor
        read = functools.partial(self._processors.read, lora.folder)
        own = yield from self._sources.study("tokenizer", lora.path, read)
        return self.input_processor if own is None else own

    @dual
    def chat_prompt(
        self, messages: list[dict[str, Any]], lora_request: AnyLoRA | None, options: ChatOptions
    ) -> Steps[Prompt]:
        """A conversation as a prompt, under the template of `options`, of the adapter or of the model, in this order.

        Raises:
            InvalidRequestError: the template refuses the messages. AdapterError: the adapter's cannot be read.
        """
        template = yield from self.chat_template(lora_request, options.get("chat_template"))
        processor = yield from self.processor_of(lora_request)
        render = functools.partial(processor.chat_prompt, messages, {**options, "chat_template": template})
        return (yield from wait_for(self._checkers.submit(render)))

    @dual
    def chat_template(self, lora_request: AnyLoRA | None, given: str | None = None) -> Steps[str | None]:
        """The chat template that is `given`, else that of the adapter's folder; None: the model's.

        Raises:
            AdapterError: the adapter's cannot be read.
        """
        if given or lora_request is None:
            return given or None
        lora = yield from self._localized(lora_request)
        return (yield from wait_for(self._checkers.submit(adapter_chat_template, lora)))

    def _localized(self, lora: AnyLoRA | None) -> Steps[LoRA | None]:
        return (yield from self._sources.localize(resolve_lora(lora, self._known)))
