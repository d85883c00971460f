"""From options to the drafter that is trained: new heads, and heads and draft models read from a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ...models.checkpoint.loader import resolve_model_path
from ...models.config import DecoderConfig, decoder_config
from ...models.families import FamilyTraits
from ...platform.core.errors import InvalidRequestError, NotFoundError, OutriderError
from .data import Sample, choose_vocab_size, frequent_tokens
from .methods.base import TrainedDrafter
from .methods.draft_lora import DraftModelLora, HeadLora
from .methods.eagle_head import Eagle1Head, Eagle3Head, EagleHead, Shared
from .methods.layers import HeadShape
from .methods.medusa_heads import MedusaHeads
from .options import TrainOptions, reason, wrong
from .target import Target, load_causal_lm

_EAGLE3_UNROLL, _EAGLE1_UNROLL = 4, 1
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
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
    if hidden % 2:
        raise wrong("hidden_size", f"must be even, got {hidden}")
    if head_dim % 2:
        raise wrong("head_dim", f"must be even, got {head_dim}")
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
        return MedusaHeads(target.lm_head, options.medusa_heads, options.medusa_layers, options.step_decay, base_name)
    if options.method == "draft-lora":
        return _draft_lora(options, target, shared)
    shape = head_shape(target, options, samples)
    if options.method == "eagle":
        return Eagle1Head(
            shape,
            shared,
            unroll=options.unroll or _EAGLE1_UNROLL,
            step_decay=options.step_decay,
            weights=(options.regression_weight, options.token_weight),
            noise=options.feature_noise,
        )
    fits, all_tokens = shape.hidden_size == target.hidden_size, shape.draft_vocab_size == shape.vocab_size
    head = Eagle3Head(
        shape,
        shared,
        target.aux_layers,
        unroll=options.unroll or _EAGLE3_UNROLL,
        step_decay=options.step_decay,
        draft_tokens=None if all_tokens else frequent_tokens(samples, shape.draft_vocab_size, target.eos_tokens),
        own=(options.own_embeddings or not fits, options.own_lm_head or not fits),
    )
    head.begin_as_last_layer()  # EAGLE's layer, which has no input norm, trains better from random weights
    return head


def _draft_lora(options: TrainOptions, target: Target, shared: Shared) -> TrainedDrafter:
    draft = options.draft or ""
    alpha = options.alpha or 2.0 * options.rank
    folder = draft_folder(draft)
    if is_head(folder):
        head = load_head(folder, target, shared, options.unroll)
        return HeadLora(head, options.rank, alpha, options.base_name or draft)
    device = shared.lm_head.device
    if options.unroll is not None:
        raise wrong("unroll", f"is for heads, and {draft} is a model of its own")
    causal = load_causal_lm(str(folder), torch.float32, device, option="draft")
    if int(causal.config.vocab_size) != target.vocab_size:
        raise InvalidRequestError(
            f"--draft: the draft model has a vocabulary of {causal.config.vocab_size} tokens, the target one of "
            f"{target.vocab_size}; they must be the same",
            param="draft",
        )
    return DraftModelLora(causal, options.rank, alpha, options.base_name or draft)


def draft_folder(draft: str) -> Path:
    """The folder of --draft: as it is, or from a hub.

    Raises:
        NotFoundError: there is none.
    """
    try:
        return resolve_model_path(draft, draft=True)
    except NotFoundError as error:
        raise NotFoundError(f"--draft: {error.message}", param="draft") from error


def read_head_config(folder: Path) -> dict[str, Any]:
    """config.json, with the nested part of the speculators format lifted up.

    Raises:
        NotFoundError: there is none.
        InvalidRequestError: it is no JSON object, or names a rotary embedding that is not computed here.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotFoundError(f"--draft: cannot read {file}: {reason(error)}", param="draft") from error
    if not isinstance(config, dict):
        raise wrong("draft", f"{file} is not a JSON object")
    nested = config.get("transformer_layer_config")
    nested = {} if nested is None else nested
    if not isinstance(nested, dict):
        raise wrong("draft", f"{file}: transformer_layer_config is not an object")
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise wrong("draft", f"{file}: architectures must be a list of names, got {named!r:.40}")
    for part in (config, nested):
        _refuse_scaled_rope(part, file)
    return {**nested, **{name: value for name, value in config.items() if value is not None}}


def _refuse_scaled_rope(config: dict[str, Any], file: Path) -> None:
    """The layer that is trained turns queries and keys without scaling; the engine would scale, and guess otherwise."""
    for field in ("rope_scaling", "rope_parameters"):
        given = config.get(field)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise wrong("draft", f"{file}: {field} is not an object")
        for key in ("rope_type", "type"):
            if given.get(key, "default") not in ("default", None):
                raise wrong(
                    "draft",
                    f"{file}: {field} of type {given[key]!r}: draft weights are trained for the default type alone",
                )


def is_head(folder: Path) -> bool:
    """True when a folder holds an EAGLE head, rather than a model of its own: heads have `fc`."""
    single = folder / "model.safetensors"
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as opened:
                return "fc.weight" in opened.keys()  # noqa: SIM118  # not a mapping
        except Exception as error:  # safetensors' errors, and the system's
            raise NotFoundError(f"--draft: cannot read {single}: {reason(error)}", param="draft") from error
    return (folder / "pytorch_model.bin").is_file() and "fc.weight" in _tensors(folder)


def is_eagle3(config: dict[str, Any]) -> bool:
    """True when the head is an EAGLE-3 head."""
    named = any("Eagle3" in name for name in config.get("architectures") or ())
    return named or "draft_vocab_size" in config or config.get("speculators_model_type") == "eagle3"


def load_head(folder: Path, target: Target, shared: Shared, unroll: int | None = None) -> EagleHead:
    """An EAGLE or EAGLE-3 head of a folder, in float32.

    Raises:
        InvalidRequestError: it does not fit the target, or is of a variant that is not trained; names both figures.
        NotFoundError: files are missing.
    """
    config, tensors = read_head_config(folder), _tensors(folder)
    refused = next((name for name in _REFUSED if config.get(name)), None)
    if refused is not None or "fc.bias" in tensors:
        raise wrong(
            "draft", f"{folder} is a head with {refused or 'a bias on fc'}, whose draft weights are not trained"
        )
    shape = _stored_shape(config, target, folder)
    head: EagleHead
    if is_eagle3(config):
        tokens = _draft_tokens(tensors, shape, folder)
        head = Eagle3Head(
            shape,
            shared,
            _stored_aux_layers(config, target, folder),
            unroll=unroll or _EAGLE3_UNROLL,
            draft_tokens=tokens,
            own=("embed_tokens.weight" in tensors, "lm_head.weight" in tensors),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )
    else:
        tensors.pop("embed_tokens.weight", None)
        head = Eagle1Head(shape, shared, unroll=unroll or _EAGLE3_UNROLL, noise=0.0)
    wanted = {name: tuple(p.shape) for name, p in head.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        name = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))[0]
        got, need = found.get(name, "nothing"), wanted.get(name, "nothing")
        raise wrong("draft", f"{folder} does not fit the target: {name} has {got}, expected {need}")
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head.to(shared.lm_head.device)


def _stored_shape(config: dict[str, Any], target: Target, folder: Path) -> HeadShape:
    """Sizes of a head from its config.json, which is read as the engine reads it."""
    layer = _stored_layer(config, target, folder)
    vocab_size = layer.vocab_size
    if vocab_size != target.vocab_size:
        raise wrong("draft", f"has a vocabulary of {vocab_size} tokens, the target one of {target.vocab_size}")
    if layer.num_layers != 1 or layer.windows != (None,):
        raise wrong("draft", f"{folder} is not a head of one layer without a window")
    sizes = {"target_hidden_size": layer.hidden_size, "draft_vocab_size": vocab_size}
    for name, default in sizes.items():
        value = default if config.get(name) is None else config[name]
        if type(value) is not int or not 1 <= value <= max(vocab_size, target.hidden_size):
            raise wrong("draft", f"{folder / 'config.json'}: {name} is {value!r:.40}")
        sizes[name] = value
    return HeadShape(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=layer.rms_norm_eps,
        rope_theta=layer.rope.theta,
        max_position_embeddings=layer.max_position_embeddings,
        **sizes,
    )


def _stored_layer(config: dict[str, Any], target: Target, folder: Path) -> DecoderConfig:
    defaults = {"vocab_size": target.vocab_size, "max_position_embeddings": 2048}
    try:
        return decoder_config(config, "eagle", torch.float32, FamilyTraits(defaults=defaults, window_switch=True))
    except OutriderError as error:
        raise wrong("draft", f"{folder}: {error.message}") from error
    except (TypeError, ValueError) as error:
        raise wrong("draft", f"{folder / 'config.json'} holds a value of a wrong type: {reason(error)}") from error


def _draft_tokens(tensors: dict[str, Tensor], shape: HeadShape, folder: Path) -> list[int] | None:
    """The target's ids of the draft vocabulary; takes the tables out of `tensors`."""
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if d2t is None:
        return None
    if d2t.shape != (shape.draft_vocab_size,) or d2t.is_floating_point():
        raise wrong("draft", f"{folder}: d2t is not a list of {shape.draft_vocab_size} integers")
    tokens: list[int] = (d2t + torch.arange(len(d2t))).tolist()
    if not all(0 <= token < shape.vocab_size for token in tokens):
        raise wrong("draft", f"{folder}: d2t names tokens beyond the target's {shape.vocab_size}")
    return tokens


def _stored_aux_layers(config: dict[str, Any], target: Target, folder: Path) -> tuple[int, ...]:
    layers = stored_aux_layers(config)
    if layers is not None and layers != target.aux_layers:
        raise wrong("draft", f"{folder} reads the target's layers {layers}, but {target.aux_layers} were prepared")
    return target.aux_layers


def stored_aux_layers(config: dict[str, Any]) -> tuple[int, ...] | None:
    """The layers that a head's config.json names, if it does.

    Raises:
        InvalidRequestError: they are no list of integers.
    """
    nested, name = config.get("eagle_config") or {}, "eagle_aux_hidden_state_layer_ids"
    layers = config.get(name, nested.get(name) if isinstance(nested, dict) else None)
    if layers is None:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise wrong("draft", f"config.json of the head: {name} must be a list of integers, got {layers!r:.40}")
    return tuple(layers)


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors by the names of our modules."""
    file = folder / "model.safetensors"
    try:
        tensors = (
            load_file(file)
            if file.is_file()
            else torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        )
        if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise TypeError("it holds more than tensors")
        return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    except Exception as error:  # a broken file raises whatever the library runs into
        raise NotFoundError(f"--draft: cannot read the weights in {folder}: {reason(error)}", param="draft") from error
