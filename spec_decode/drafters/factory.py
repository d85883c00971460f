"""The one place where drafters are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...platform.core.errors import OutriderError
from ...platform.core.speculative_config import SpeculativeConfig
from .base import Drafter, NoDrafter

if TYPE_CHECKING:
    from ...models.decoder import Decoder
    from ...models.pass_graphs import PassGraphs
    from ..verify.draft_sampling import EditLogits

PARAM = "speculative_config"
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """What drafters are built from, beside their own configuration."""

    target: Decoder
    """Drafts are its token ids; heads read its hidden states, and may share its embeddings and its head."""
    model_path: str | None = None
    """Folder of the target, whose tokenizer a draft model's is compared with."""
    device: str
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    load_format: str = "auto"
    """"auto" or "dummy"."""
    seed: int = 0
    """Of dummy weights."""
    progress: bool = False
    """Whether to show a progress bar while weights load."""
    max_num_batched_tokens: int = 2048
    """Most tokens that a drafter with layers computes in one pass."""
    max_model_len: int = 2048
    edit_logits: EditLogits | None = None
    """What masks, biases and penalties do to the target's logits, for those of drafters."""
    graphs: PassGraphs | None = None
    """Where drafters capture their passes; None: they are launched piece by piece."""
    asynchronous: bool = False
    """Whether another thread than the one that drafts may compute the target's steps."""


def _ngram(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    from .ngram import NgramDrafter

    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)


def _suffix(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    from .suffix.drafter import SuffixDrafter

    return SuffixDrafter(config)


def _draft_model(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    from .draft_model import load_draft_model

    return load_draft_model(config, context)


def _eagle(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    from .eagle.drafter import load_eagle

    return load_eagle(config, context)


def _medusa(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    from .medusa.drafter import load_medusa

    return load_medusa(config, context)


# method of `speculative_config` -> factory; what it needs is imported on use.
_FACTORIES: dict[str, Callable[[SpeculativeConfig, DrafterContext], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _draft_model,
    "eagle": _eagle,
    "eagle3": _eagle,
    "medusa": _medusa,
}


def make_drafter(config: SpeculativeConfig | None, context: DrafterContext) -> Drafter:
    """The drafter that `config` asks for; None is no speculation.

    Raises:
        InvalidRequestError: the drafter does not fit the target, or its files are damaged.
        UnsupportedModelError: something it would need is not supported.
        NotFoundError: its model does not exist. `param` is "speculative_config" for all of these.
    """
    if config is None:
        return NoDrafter()
    with _naming(config.model):
        return _FACTORIES[config.method](config, context)


def draft_kv_bytes_per_token(config: SpeculativeConfig | None, dtype: str, kv_cache_dtype: str = "auto") -> int:
    """Bytes a token in the layers that the drafter will own, from its config.json alone, before anything is loaded.

    Args:
        dtype: in which it will be served.
        kv_cache_dtype: see `models.batch.kv_dtype`.

    Raises:
        NotFoundError, UnsupportedModelError: as for any model.
    """
    if config is None or config.model is None or config.method == "medusa":
        return 0
    from ...models.checkpoint.loader import read_facts, resolve_model_path

    with _naming(config.model):
        path = resolve_model_path(
            config.model,
            draft=config.method != "draft_model",
            revision=config.revision,
            cache_dir=config.download_dir,
        )
        if config.method == "draft_model":
            return read_facts(path, dtype, kv_cache_dtype).kv_bytes_per_token
        from .eagle.drafter import eagle_kv_bytes_per_token

        return eagle_kv_bytes_per_token(path, dtype, kv_cache_dtype)


@contextmanager
def _naming(model: str | None) -> Iterator[None]:
    """What is wrong with a draft's files is said of `model` and of the speculative_config, whoever finds it: the same
    code reads the target's."""
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
