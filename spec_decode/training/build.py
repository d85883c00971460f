"""From options to the drafter that is trained: new heads, and heads and draft models read from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.checkpoint.json_files import read_json
from ...models.checkpoint.loader import resolve_model_path
from ...models.config import config_from_hf
from ...models.layers.weights import WeightSlot
from ...platform.core.errors import InvalidRequestError, NotFoundError, OutriderError
from ..drafters.checkpoint import PARAM, StoredTensor, fill
from ..drafters.eagle.config import HIDDEN_NORM, EagleConfig, head_tensors, read_eagle_config, with_tensors
from .data import Sample, choose_vocab_size, frequent_tokens
from .methods.base import TrainedDrafter
from .methods.draft_lora import DraftModelLora, HeadLora
from .methods.eagle_head import Eagle1Head, Eagle3Head, EagleHead, Shared
from .methods.layers import HeadShape
from .methods.medusa_heads import MedusaHeads
from .options import TrainOptions, wrong
from .target import Target, load_causal_lm

_EAGLE3_UNROLL, _EAGLE1_UNROLL = 4, 1
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output", "fc_bias", "qkv_bias", "o_bias", "mlp_bias")
"""Variants of heads whose draft weights are not trained here."""


def rope_theta_of(config: Any) -> float:
    """rope_theta of a transformers configuration, old or new."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", None) or 10000.0))


def head_shape(target: Target, options: TrainOptions, samples: Sequence[Sample]) -> HeadShape:
    """Sizes of a new head: the target's unless told otherwise; EAGLE-3's vocabulary is what `samples` need.

    Raises:
        InvalidRequestError: sizes that do not go together; names the option.
    """
    config = target.config
    hidden = options.hidden_size or target.hidden_size
    num_heads = options.num_heads or int(config.num_attention_heads)
    kv_heads = options.num_kv_heads or min(num_heads, int(getattr(config, "num_key_value_heads", None) or num_heads))
    head_dim = options.head_dim or int(getattr(config, "head_dim", None) or target.hidden_size // num_heads)
    if num_heads % kv_heads:
        raise wrong("num_kv_heads", f"{kv_heads} must divide --num-heads {num_heads}")
    draft_vocab = options.draft_vocab_size or target.vocab_size
    if options.method == "eagle3" and options.draft_vocab_size is None:
        draft_vocab = choose_vocab_size(samples, target.vocab_size)
    if draft_vocab > target.vocab_size:
        raise wrong("draft_vocab_size", f"{draft_vocab} exceeds the target's vocabulary of {target.vocab_size} tokens")
    return HeadShape(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or int(config.intermediate_size),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=float(config.rms_norm_eps),
        rope_theta=rope_theta_of(config),
        max_position_embeddings=int(config.max_position_embeddings),
    )


def new_drafter(options: TrainOptions, target: Target, samples: Sequence[Sample]) -> TrainedDrafter:
    """A new drafter for `options.method`, with weights from the seed.

    Raises:
        InvalidRequestError, NotFoundError: sizes or files that do not fit.
    """
    torch.manual_seed(options.seed)
    shared = Shared(target.embeddings, target.lm_head, target.last_layer)
    if options.method == "medusa":
        base_name = options.base_name or options.model
        return MedusaHeads(target.lm_head, options.medusa_heads, options.medusa_layers, base_name)
    if options.method == "draft-lora":
        return _draft_lora(options, target, shared)
    shape = head_shape(target, options, samples)
    if options.method == "eagle":
        return Eagle1Head(shape, shared, options.unroll or _EAGLE1_UNROLL)
    fits, all_tokens = shape.hidden_size == target.hidden_size, shape.draft_vocab_size == shape.vocab_size
    head = Eagle3Head(
        shape,
        shared,
        target.aux_layers,
        unroll=options.unroll or _EAGLE3_UNROLL,
        draft_tokens=None if all_tokens else frequent_tokens(samples, shape.draft_vocab_size, target.eos_tokens),
        own=(options.own_embeddings or not fits, options.own_lm_head or not fits),
    )
    head.begin_as_last_layer()  # EAGLE's layer, which has no input norm, trains better from random weights
    return head


def _draft_lora(options: TrainOptions, target: Target, shared: Shared) -> TrainedDrafter:
    draft = options.draft or ""
    alpha = options.alpha or 2.0 * options.rank
    stored = read_head(options)
    if stored is not None:
        return HeadLora(
            load_head(stored, target, shared, options.unroll), options.rank, alpha, options.base_name or draft
        )
    device = shared.lm_head.device
    if options.unroll is not None:
        raise wrong("unroll", f"is for heads, and {draft} is a model of its own")
    causal = load_causal_lm(draft, torch.float32, device, option="draft")
    if int(causal.config.vocab_size) != target.vocab_size:
        raise InvalidRequestError(
            f"--draft: the draft model has a vocabulary of {causal.config.vocab_size} tokens, the target one of "
            f"{target.vocab_size}; they must be the same",
            param="draft",
        )
    return DraftModelLora(causal, options.rank, alpha, options.base_name or draft)


class StoredHead(NamedTuple):
    """An EAGLE head of a folder, read as the engine reads it."""

    folder: Path
    config: EagleConfig
    tensors: dict[str, StoredTensor]


def read_head(options: TrainOptions) -> StoredHead | None:
    """The head that --draft names; None when it is a model of its own: heads have `fc`.

    Raises:
        NotFoundError, InvalidRequestError: files are missing or damaged, or do not fit the target.
    """
    with _errors_name_draft():
        folder = resolve_model_path(options.draft or "", draft=True)
        tensors = head_tensors(folder)
    if "fc.weight" not in tensors:
        return None
    target = config_from_hf(read_json(resolve_model_path(options.model) / "config.json"), torch.float32)
    with _errors_name_draft():
        method = "eagle3" if HIDDEN_NORM in tensors else "eagle"
        config = read_eagle_config(read_json(folder / "config.json"), method, target)
        return StoredHead(folder, with_tensors(config, tensors), tensors)


@contextmanager
def _errors_name_draft() -> Iterator[None]:
    """Let errors about a drafter's files name the option."""
    try:
        yield
    except OutriderError as error:
        kind = NotFoundError if isinstance(error, NotFoundError) else InvalidRequestError
        raise kind(f"--draft: {error.message.removeprefix(f'{PARAM}: ')}", param="draft") from error


def load_head(stored: StoredHead, target: Target, shared: Shared, unroll: int | None = None) -> EagleHead:
    """An EAGLE or EAGLE-3 head, in float32.

    Raises:
        InvalidRequestError: it does not fit the target, or is of a variant that is not trained.
    """
    config, tensors = stored.config, dict(stored.tensors)
    layer = config.layer
    refused = next((name for name in _REFUSED if getattr(config, name, False) or getattr(layer, name, False)), None)
    if layer.rope.rope_type != "default":
        refused = f"rope_scaling of type {layer.rope.rope_type!r}"
    elif layer.windows != (None,):
        refused = "a sliding window"
    if refused is not None:
        raise wrong("draft", f"{stored.folder} is a head with {refused}, whose draft weights are not trained")
    shape = HeadShape(
        hidden_size=layer.hidden_size,
        target_hidden_size=config.target_hidden_size,
        intermediate_size=layer.intermediate_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        vocab_size=layer.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        rms_norm_eps=layer.rms_norm_eps,
        rope_theta=layer.rope.theta,
        max_position_embeddings=layer.max_position_embeddings,
    )
    head: EagleHead
    if config.eagle3:
        d2t = tensors.pop("d2t", None)
        head = Eagle3Head(
            shape,
            shared,
            config.aux_layers,
            unroll=unroll or _EAGLE3_UNROLL,
            draft_tokens=None if d2t is None else _draft_tokens(d2t.read(), shape),
            own=("embed_tokens.weight" in tensors, "lm_head.weight" in tensors),
            norm_before_residual=config.norm_before_residual,
        )
    else:
        tensors.pop("embed_tokens.weight", None)
        head = Eagle1Head(shape, shared, unroll or _EAGLE3_UNROLL, noise=0.0)
    with _errors_name_draft():
        slots = {name: WeightSlot(tuple(p.shape), p.data.copy_) for name, p in head.named_parameters()}
        fill(stored.folder, slots, tensors)
    return head.to(shared.lm_head.device)


def _draft_tokens(d2t: Tensor, shape: HeadShape) -> list[int]:
    """The target's ids of the draft vocabulary."""
    if d2t.shape != (shape.draft_vocab_size,) or d2t.is_floating_point():
        raise wrong("draft", f"d2t is not a list of {shape.draft_vocab_size} integers")
    tokens: list[int] = (d2t + torch.arange(len(d2t))).tolist()
    if not all(0 <= token < shape.vocab_size for token in tokens):
        raise wrong("draft", f"d2t names tokens beyond the target's {shape.vocab_size}")
    return tokens
