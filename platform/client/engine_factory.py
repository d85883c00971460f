"""The engine as clients see it, and the functions that make one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any, Protocol, cast

from ...models.demo import demo_adapters
from ..core.adapter_verbs import LocalAdapters
from ..core.compat.unsupported_options import reject_unsupported_options
from ..core.compat.vllm_options import ENGINE, without_effect
from ..core.compat.vllm_python import ENGINE_LIFE, METHODS
from ..core.config import EngineArgs
from ..core.errors import InvalidRequestError, OutriderError
from ..core.kv_events import KVEventSource
from ..core.lora_request import LoRARequest
from ..core.messages import EngineInfo, EngineRequest, EngineStats, TokenDelta
from ..core.weight_source import WeightSource
from .demo_defaults import apply_demo_defaults, is_demo

logger = logging.getLogger(__name__)

_PACKAGE = __name__.rsplit(".platform.", 1)[0]

DEFAULT_ENGINE = f"{_PACKAGE}.platform.engine.engine_core:EngineCore"
"""Import path "module:callable" of the engine. A path and not the class, so that another process can be given it."""


class Engine(Protocol):
    """The engine as its clients see it; `EngineCore` says what each call raises."""

    info: EngineInfo

    def add_request(self, request: EngineRequest) -> None:
        """Queue a sequence."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop sequences; no delta follows."""

    def has_work(self) -> bool:
        """True when `step` has something to do."""

    def step(self) -> list[TokenDelta]:
        """Compute one step."""

    def learn(self) -> float | None:
        """Train drafts for a moment; seconds until it may be called again, None if there is nothing to train."""

    @property
    def adapters(self) -> LocalAdapters:
        """Loads, unloads and pins adapters."""

    def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Compute no steps for new sequences, and none at all once the others have ended or are kept."""

    def resume(self) -> None:
        """End the pause."""

    def update_weights(self, sources: Sequence[WeightSource], *, draft: bool = False) -> bool:
        """Replace weights; False if the target keeps some of its own."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless its allocators agree with what its sequences hold."""

    def stats(self) -> EngineStats:
        """A snapshot."""

    def start_profile(self, folder: str, prefix: str) -> None:
        """Begin to record steps with torch's profiler."""

    def stop_profile(self) -> str:
        """Write the profile; returns the path of its trace."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached KV; True when nothing is cached any more."""

    def kv_event_sources(self) -> list[KVEventSource]:
        """Addresses at which events of the KV cache are published."""

    def release_memory(self) -> None:
        """Give the memory of the KV cache back."""

    def shutdown(self) -> None:
        """Release everything."""


def engine_args(who: str, model: str | None, options: dict[str, Any]) -> EngineArgs:
    """`EngineArgs` from keywords; without a model the embedded demo with its adapters and its draft model.

    Raises:
        TypeError: an option that does not exist, by name; `who` is the caller's name for the message.
    """
    own = own_options(who, options)
    args, _ = apply_demo_defaults(EngineArgs(model=None if model is None else str(model), **own), own)
    return args


def own_options(who: str, options: dict[str, Any]) -> dict[str, Any]:
    """The `options` that are fields of `EngineArgs` and are given; of vLLM's, those without an effect are logged.

    Raises:
        TypeError: an option that does not exist, by name.
        InvalidRequestError: an option of vLLM that would have an effect and is not there.
    """
    fields = EngineArgs.__dataclass_fields__
    given = dict(options)
    reject_unsupported_options(f"{who}()", given, ENGINE, fields)
    for name, why in without_effect({}, ENGINE, given.get("speculative_config")).items():
        logger.warning("%s has no effect: %s", name, why)
    # vLLM writes None for the default of every option.
    return {name: value for name, value in given.items() if value is not None or fields[name].default is None}


def check_life_options(who: str, of_vllm: dict[str, Any]) -> None:
    """Check the keywords of vLLM's `from_engine_args` (`vllm_python.ENGINE_LIFE`), which have no effect."""
    reject_unsupported_options(f"{who}.from_engine_args()", of_vllm, ENGINE_LIFE, ("engine_args", "engine", "sources"))


def missing_attribute(owner: object, name: str) -> AttributeError:
    """The error for an attribute that is not there; for a method of vLLM's it says what is here instead."""
    sentence = f"{type(owner).__name__}.{name} {METHODS.get(name, 'does not exist')}"
    return AttributeError(sentence, name=name, obj=owner)


def load_engine(path: str) -> Callable[..., Engine]:
    """The callable `(args: EngineArgs, *, progress: bool) -> Engine` behind an import path "module:callable"."""
    return cast(Callable[..., Engine], resolve_name(path))


def import_text_side(args: EngineArgs) -> None:
    """Import the modules that `load_text_side` needs, which takes seconds; the demo's tokenizer needs few."""
    from ...models.checkpoint.gguf_file import is_gguf
    from ...models.checkpoint.tokenizer import import_transformers, load_tokenizer

    name = args.tokenizer or args.model
    if args.skip_tokenizer_init:
        return
    if name is not None and is_gguf(name):  # transformers imports what the file's tokenizer needs
        with suppress(OutriderError):
            load_tokenizer(name)
    elif is_demo(args) and args.tokenizer is None:
        import_transformers("PreTrainedTokenizerFast")
    else:
        import_transformers()


def load_text_side(args: EngineArgs, info: EngineInfo) -> tuple[Any, list[int]]:
    """The tokenizer (None under `skip_tokenizer_init`) and the end-of-sequence ids for a started engine."""
    from ...models.checkpoint.generation_config import chosen_file
    from ...models.checkpoint.paths import tokenizer_path
    from ...models.checkpoint.tokenizer import eos_token_ids, load_tokenizer

    tokenizer = None
    if not args.skip_tokenizer_init:
        try:
            tokenizer = load_tokenizer(tokenizer_path(args, info.model))
        except InvalidRequestError as error:
            hint = "; skip_tokenizer_init serves token ids without a tokenizer"
            raise InvalidRequestError(error.message + hint, param=error.param) from error
    return tokenizer, sorted(eos_token_ids(info.model, tokenizer, chosen_file(args.generation_config)))


def demo_lora_requests(args: EngineArgs) -> dict[str, LoRARequest]:
    """The embedded demo's adapters by name; empty for another model, or when adapters are off."""
    if not (is_demo(args) and args.enable_lora):
        return {}
    return {name: LoRARequest(name, path=str(path)) for name, path in demo_adapters().items()}
