"""The choice of a drafter: the registry of methods, and the context that drafters are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...models.checkpoint.json_files import read_json
from ...models.checkpoint.paths import resolve_model_path
from ...platform.core.errors import OutriderError
from ...platform.core.speculative_config import IN_TARGET_METHODS, MAX_DRAFTS, MODEL_METHODS, SpeculativeConfig
from .base import Drafter, NoDrafter
from .checkpoint import refuse

if TYPE_CHECKING:
    from pathlib import Path

    from ...models.model import LanguageModel, ModelConfig
    from ...models.pass_graphs import PassGraphs
    from ..verify.draft_sampling import EditLogits

PARAM = "speculative_config"
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """Everything that drafters are built from, in addition to their own configuration."""

    target: LanguageModel
    """Drafts are its token ids; heads read its hidden states, and may share its embeddings and its head."""
    model_path: str | None = None
    """Folder of the target, whose tokenizer a draft model's is compared with."""
    device: str
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    load_format: str = "auto"
    """"auto" or "dummy"."""
    quantization: str | None = None
    """Method by which a drafter's weights are quantised while loading, if neither its configuration nor its files name
    one."""
    seed: int = 0
    """Seed of dummy weights."""
    progress: bool = False
    """True to show a progress bar while weights load."""
    max_num_batched_tokens: int = 2048
    """Most tokens that a drafter with layers computes in one pass."""
    max_model_len: int = 2048
    max_num_seqs: int = 256
    """Most requests of a step."""
    edit_logits: EditLogits | None = None
    """Applies a request's masks, biases and penalties to the logits of drafters."""
    graphs: PassGraphs | None = None
    """Graphs in which drafters capture their passes; None: passes are launched kernel by kernel."""


_MODULES = {
    "ngram": ".ngram",
    "suffix": ".suffix.drafter",
    "draft_model": ".draft_model",
    "eagle": ".eagle.loader",
    "eagle3": ".eagle.loader",
    "medusa": ".medusa.drafter",
    "mtp": ".mtp.drafter",
    "dflash": ".dflash.drafter",
    "dspark": ".dflash.drafter",
    "uno": ".uno",
    "oracle": ".oracle",
}
"""Method of `speculative_config` -> module, imported on use. It has `load(config, context) -> Drafter` and, if the
drafter owns layers, `kv_bytes_per_token(config, dtype, kv_cache_dtype) -> int`; if it has files, `check(config,
target, model_path)`."""


def make_drafter(config: SpeculativeConfig | None, context: DrafterContext) -> Drafter:
    """The drafter of `config`; None is no speculation.

    Raises:
        InvalidRequestError: the drafter does not fit the target, or its files are damaged.
        UnsupportedModelError: it needs something that is not supported.
        NotFoundError: its model does not exist. `param` is "speculative_config" for all of these.
    """
    if config is None:
        return NoDrafter()
    config = _with_model(config, context.model_path)
    with _errors_name(config.model):
        drafter: Drafter = _module(config.method).load(config, context)
        return drafter


def draft_kv_bytes_per_token(
    config: SpeculativeConfig | None, dtype: str, kv_cache_dtype: str = "auto", model_path: Path | None = None
) -> int:
    """Bytes a token in the layers that the drafter will own, from its config.json alone, before anything is loaded.

    Args:
        dtype: the dtype in which the drafter will be served.
        kv_cache_dtype: see `models.batch.kv_dtype`.
        model_path: folder of the target.

    Raises:
        NotFoundError, UnsupportedModelError: as for any model.
    """
    if config is None:
        return 0
    config = _with_model(config, model_path)
    with _errors_name(config.model):
        found: Callable[..., int] | None = getattr(_module(config.method), "kv_bytes_per_token", None)
        return 0 if found is None else found(config, dtype, kv_cache_dtype)


def named_drafts(config: SpeculativeConfig | None) -> int | None:
    """Drafts a step that the drafter's config.json names, at most `MAX_DRAFTS`; None: it names no number. The
    speculators format has it in the first of `proposal_methods`.

    Raises:
        InvalidRequestError: it is no positive integer.
        NotFoundError: there is no such drafter.
    """
    if config is None or config.model is None or config.method not in MODEL_METHODS:
        return None
    with _errors_name(config.model):
        is_head = config.method != "draft_model"  # a draft model may be a GGUF file
        path = resolve_model_path(config.model, draft=is_head, revision=config.revision, cache_dir=config.download_dir)
        raw = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        match raw.get("speculators_config"):
            case {"proposal_methods": [{"speculative_tokens": named}, *_]} if named is not None:
                if isinstance(named, bool) or not isinstance(named, int) or named < 1:
                    raise refuse(f"config.json: speculative_tokens must be a positive integer, got {named!r}")
                return min(named, MAX_DRAFTS)
    return None


def check_drafter(config: SpeculativeConfig | None, target: ModelConfig, model_path: Path) -> None:
    """Refuse a drafter that does not fit the target, from config.json alone, before any weights are loaded.

    Raises:
        InvalidRequestError, UnsupportedModelError, NotFoundError: as in `make_drafter`.
    """
    if config is None:
        return
    config = _with_model(config, model_path)
    with _errors_name(config.model):
        found: Callable[..., None] | None = getattr(_module(config.method), "check", None)
        if found is not None:
            found(config, target, model_path)


def _with_model(config: SpeculativeConfig, target: Path | str | None) -> SpeculativeConfig:
    """`config` whose `model` is the target's folder if the drafter's weights are there."""
    if config.model is not None or config.method not in IN_TARGET_METHODS:
        return config
    return replace(config, model=str(target))


def _module(method: str) -> Any:
    return import_module(_MODULES[method], __package__)


@contextmanager
def _errors_name(model: str | None) -> Iterator[None]:
    """Let errors of a drafter's files name `model` and the speculative_config; the code that raises them reads the
    target's files too."""
    try:
        yield
    except OutriderError as error:
        if model is None:
            raise
        shown = model if len(model) <= _MAX_SHOWN else f"{model[:_MAX_SHOWN]}..."
        message = error.message.removeprefix(f"{PARAM}: ")
        if model not in message:
            message = f"{shown}: {message}"
        raise type(error)(f"{PARAM}: {message}", param=PARAM) from error
