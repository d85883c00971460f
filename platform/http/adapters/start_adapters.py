"""Adapters of the options: checked while the model is loaded, loaded before the first request.

Imports at the top are light on purpose: the web stack is loaded while the engine process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.adapter_files import AdapterFolder
from ...core.config import EngineArgs
from ...core.errors import AdapterError, AdapterSourceError, InvalidRequestError
from ...core.lora_request import LoRARequest
from ...core.tasks import run_all
from ...core.text import shorten
from ..server_config import ServerConfig

if TYPE_CHECKING:
    from .model_registry import ModelRegistry

_MAX_FETCHES = 64
"""Number of adapters of the options that are fetched at once; the sources refuse more than some hundred that wait."""


async def load_adapters(models: ModelRegistry, config: ServerConfig) -> None:
    """Load the adapters of the options at once. They are listed in their order, whichever is read first.

    Raises:
        InvalidRequestError, AdapterSourceError: one of them cannot be loaded; the message begins with its name.
    """
    from ...client.adapters.sources.resolver import shown_source

    # It needs the web stack, which is imported while the engine starts.
    from .source_policy import AdapterPolicy

    policy, turns = AdapterPolicy(config), asyncio.Semaphore(_MAX_FETCHES)

    @contextlib.contextmanager
    def named(name: str) -> Iterator[None]:
        try:
            yield
        except (InvalidRequestError, AdapterSourceError) as error:
            shown = shown_source(config.lora_modules[name])
            raise type(error)(f"{shorten(name)}={shown}: {error.message}", param="lora_modules") from error

    async def fetch(name: str, path: str) -> LoRARequest:
        with named(name):
            draft_path = config.lora_draft_paths.get(name)
            roots = policy.allowed_roots((path, draft_path), "")
            async with turns:
                return await models.fetch(LoRARequest(name, path=path, draft_path=draft_path, roots=roots))

    async def load(request: LoRARequest) -> None:
        with named(request.name):
            await models.load(request, root=config.lora_modules[request.name])

    # The engine gets the loads in the order in which they begin, because nothing is left to fetch.
    requests = await run_all(fetch(name, path) for name, path in config.lora_modules.items())
    await run_all(map(load, requests))


def check_adapters(args: EngineArgs, config: ServerConfig) -> None:
    """Refuse adapters of the options that cannot fit a model in a local folder, while that is still being loaded.

    Raises:
        InvalidRequestError: one of them does not; the message begins with its name.
    """
    from ....models.demo import demo_model_path
    from ...client.adapters.sources.resolver import LOCAL_SCHEMES, local_path, shown_source, source_scheme
    from ...client.adapters.start_check import check_fits

    model = demo_model_path() if args.model is None else Path(args.model).expanduser()
    for name, path in config.lora_modules.items() if args.enable_lora and model.exists() else ():
        if source_scheme(path) in (None, *LOCAL_SCHEMES):
            try:
                check_fits(AdapterFolder(local_path(path)), model, args.max_lora_rank)
            except AdapterError as error:
                raise AdapterError(
                    f"{shorten(name)}={shown_source(path)}: {error.message}", param="lora_modules"
                ) from error
