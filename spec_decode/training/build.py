"""Builds the drafter to train from options: new heads, and heads and draft models read from a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.paged_attention import WholeRow, window_size
from ...models.checkpoint.gguf_file import is_gguf
from ...models.checkpoint.json_files import read_json
from ...models.checkpoint.paths import resolve_model_path
from ...models.config import DecoderConfig
from ...models.layers.weights import WeightSlot
from ...models.rope_config import RopeConfig
from ...platform.core.errors import InvalidRequestError, NotFoundError, OutriderError, UnsupportedModelError
from ..drafters.checkpoint import PARAM, StoredTensor, fill
from ..drafters.dflash import config as blocks
from ..drafters.dflash.config import DFlashConfig
from ..drafters.eagle.config import HIDDEN_NORM, EagleConfig, head_tensors, read_eagle_config, with_tensors
from .data import Sample, choose_vocab_size, frequent_tokens
from .methods.base import TrainedDrafter
from .methods.block_head import BlockHead
from .methods.draft_lora import DraftModelLora, HeadLora
from .methods.eagle_head import Eagle1Head, Eagle3Head, EagleHead
from .methods.medusa_heads import MedusaHeads
from .methods.target_lora import TargetLora
from .options import BLOCK_HEADS, TrainOptions, wrong
from .target import Target, load_causal_lm, read_config

_EAGLE3_UNROLL, _EAGLE1_UNROLL = 4, 1
_BLOCK_NORM, _MARKOV = "hidden_norm.weight", "markov_head.markov_w1.weight"
"""Tensors that every drafter of blocks has, and no EAGLE head; and every DSpark drafter."""
_LEAST_WINDOW = 2048
"""Least sliding window of a head, in tokens. Training attends to whole samples, which by default are no longer."""
_REFUSED = (
    *("norm_before_fc", "fc_norm", "norm_output", "fc_bias", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"),
    *("several_layers", "drafts_in_parallel"),
)
"""Variants of heads whose draft weights are not trained here."""
_REFUSED_BLOCKS = ("own_embedding", "own_head", "own_vocabulary", "qkv_bias", "o_bias")
"""Variants of drafters of blocks, likewise."""


def head_config(options: TrainOptions, target: Target, samples: Sequence[Sample]) -> EagleConfig:
    """Sizes of a new head: by default the target's; EAGLE-3's vocabulary is chosen from `samples`.

    Raises:
        InvalidRequestError: incompatible sizes; names the option.
        UnsupportedModelError: the target is not of Llama's shape.
    """
    config, eagle3, layer = target.config, options.method == "eagle3", _layer_config(options, target)
    draft_vocab = options.draft_vocab_size or config.vocab_size
    if eagle3 and options.draft_vocab_size is None:
        draft_vocab = choose_vocab_size(samples, config.vocab_size)
    if draft_vocab > config.vocab_size:
        raise wrong("draft_vocab_size", f"{draft_vocab} exceeds the target's vocabulary of {config.vocab_size} tokens")
    fits = layer.hidden_size == config.hidden_size
    return EagleConfig(
        eagle3=eagle3,
        layer=layer,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=draft_vocab,
        aux_layers=target.aux_layers,
        own_embedding=options.own_embeddings or not fits,
        own_head=options.own_lm_head or not fits,
    )


def block_config(options: TrainOptions, target: Target) -> DFlashConfig:
    """Sizes of a new drafter of blocks: by default the target's.

    Raises:
        InvalidRequestError: incompatible sizes; names the option.
        UnsupportedModelError: the target is not of Llama's shape.
    """
    layer, size, is_dspark = _layer_config(options, target), target.config.vocab_size, options.method == "dspark"
    mask = size - 1 if options.mask_token_id is None else options.mask_token_id
    if mask >= size:
        raise wrong("mask_token_id", f"{mask} is beyond the target's vocabulary of {size} tokens")
    return DFlashConfig(
        layer=replace(layer, num_layers=options.draft_layers, windows=(None,) * options.draft_layers),
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=size,
        aux_layers=target.aux_layers,
        block_size=options.block_size,
        mask_token_id=mask,
        sample_from_anchor=is_dspark,
        markov_rank=options.markov_rank if is_dspark else 0,
        has_confidence=is_dspark,
        confidence_reads_markov=is_dspark,
    )


def _layer_config(options: TrainOptions, target: Target) -> DecoderConfig:
    """A layer of a new head."""
    config = target.config
    if not config.is_plain:
        message = f"heads with layers are not trained for {config.architecture}, which is not of Llama's shape"
        raise UnsupportedModelError(message, param="model")
    num_heads = options.num_heads or config.num_heads
    layer = replace(
        config,
        hidden_size=options.hidden_size or config.hidden_size,
        intermediate_size=options.intermediate_size or config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=options.num_kv_heads or min(num_heads, config.num_kv_heads),
        head_dim=options.head_dim or config.head_dim,
        rope=RopeConfig(rope_type="default", theta=config.rope.theta),
    )
    if num_heads % layer.num_kv_heads:
        raise wrong("num_kv_heads", f"{layer.num_kv_heads} must divide --num-heads {num_heads}")
    return layer


def new_drafter(options: TrainOptions, target: Target, samples: Sequence[Sample]) -> TrainedDrafter:
    """A new drafter for `options.method`, with weights from the seed.

    Raises:
        InvalidRequestError, NotFoundError: sizes or files that do not fit.
    """
    torch.manual_seed(options.seed)
    if options.method == "medusa":
        base_name = options.base_name or options.model
        return MedusaHeads(target.lm_head, options.medusa_heads, options.medusa_layers, base_name)
    if options.method == "draft-lora":
        return _draft_lora(options, target)
    if options.method == "uno":
        return _target_lora(options, target)
    if options.draft is not None:
        return _head_to_train_further(options, target)
    if options.method in BLOCK_HEADS:
        return BlockHead(block_config(options, target), target)
    config = head_config(options, target, samples)
    if options.method == "eagle":
        return Eagle1Head(config, target, options.unroll or _EAGLE1_UNROLL)
    tokens, size = None, config.draft_vocab_size
    if size != target.config.vocab_size:
        tokens = frequent_tokens(samples, size, target.eos_tokens)
    head = Eagle3Head(config, target, options.unroll or _EAGLE3_UNROLL, tokens)
    head.begin_as_last_layer()  # EAGLE's layer, which has no input norm, trains better from random weights
    return head


def _head_to_train_further(options: TrainOptions, target: Target) -> TrainedDrafter:
    """The head of --draft, to be trained with its weights."""
    stored = read_head(options)
    if isinstance(stored, StoredHead) and options.method == ("eagle3" if stored.config.eagle3 else "eagle"):
        return load_head(stored, target, options.unroll or (None if stored.config.eagle3 else _EAGLE1_UNROLL))
    if isinstance(stored, StoredBlocks) and options.method == ("dspark" if stored.config.markov_rank else "dflash"):
        return load_blocks(stored, target)
    raise wrong("draft", f"{options.draft} is not a head that --method {options.method} can train further")


def _target_lora(options: TrainOptions, target: Target) -> TrainedDrafter:
    config = target.config
    narrow = [window for window in config.windows if window is not None and window_size(window) < options.max_length]
    if config.states is not None or narrow:
        what = f"a sliding window of {window_size(narrow[0])} tokens" if narrow else "layers of recurrent state"
        hint = ", less than --max-length" if narrow else ""
        message = f"uno is not trained for {config.architecture} with {what}{hint}"
        raise UnsupportedModelError(message, param="model")
    alpha = options.alpha or 2.0 * options.rank
    return TargetLora(target, options.block_size, options.rank, alpha, options.base_name or options.model)


def _draft_lora(options: TrainOptions, target: Target) -> TrainedDrafter:
    draft = options.draft or ""
    alpha = options.alpha or 2.0 * options.rank
    stored = read_head(options)
    if isinstance(stored, StoredBlocks):
        if options.unroll is not None:
            raise wrong("unroll", f"is for heads that draft token by token, and {draft} drafts blocks")
        return HeadLora(load_blocks(stored, target), options.rank, alpha, options.base_name or draft)
    if stored is not None:
        return HeadLora(load_head(stored, target, options.unroll), options.rank, alpha, options.base_name or draft)
    device = target.lm_head.device
    if options.unroll is not None:
        raise wrong("unroll", f"is for heads, and {draft} is a model of its own")
    causal = load_causal_lm(draft, torch.float32, device, option="draft")
    if int(causal.config.vocab_size) != target.config.vocab_size:
        raise InvalidRequestError(
            f"--draft: the draft model has a vocabulary of {causal.config.vocab_size} tokens, the target one of "
            f"{target.config.vocab_size}; they must be the same",
            param="draft",
        )
    return DraftModelLora(causal, options.rank, alpha, options.base_name or draft)


class StoredHead(NamedTuple):
    """An EAGLE head of a folder, read as the engine reads it."""

    folder: Path
    config: EagleConfig
    tensors: dict[str, StoredTensor]

    @property
    def method(self) -> str:
        """Method of speculation."""
        return "eagle3" if self.config.eagle3 else "eagle"


class StoredBlocks(NamedTuple):
    """A DFlash or DSpark drafter of a folder, read as the engine reads it."""

    folder: Path
    config: DFlashConfig
    tensors: dict[str, StoredTensor]

    @property
    def method(self) -> str:
        """Method of speculation."""
        return "dspark" if self.config.markov_rank else "dflash"


def read_head(options: TrainOptions) -> StoredHead | StoredBlocks | None:
    """The head, or drafter of blocks, that --draft names; None when it is a model of its own: the others have `fc`,
    and are no GGUF files.

    Raises:
        NotFoundError, InvalidRequestError: files are missing or damaged, or do not fit the target.
    """
    if is_gguf(options.draft or ""):
        return None
    with _errors_name_draft():
        folder = resolve_model_path(options.draft or "", draft=True)
        tensors = head_tensors(folder)
    if "fc.weight" not in tensors:
        return None
    target = read_config(options.model)
    with _errors_name_draft():
        if _BLOCK_NORM in tensors:
            method, tensors = "dspark" if _MARKOV in tensors else "dflash", blocks.head_tensors(folder)
            sizes = blocks.read_dflash_config(read_json(folder / "config.json"), method, target)
            return StoredBlocks(folder, blocks.with_tensors(sizes, tensors), tensors)
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


def load_head(stored: StoredHead, target: Target, unroll: int | None = None) -> EagleHead:
    """An EAGLE or EAGLE-3 head, in float32.

    Raises:
        InvalidRequestError: it does not fit the target, or is of a variant that is not trained.
    """
    config, tensors = stored.config, dict(stored.tensors)
    layer = config.layer
    refused = next((name for name in _REFUSED if getattr(config, name, False) or getattr(layer, name, False)), None)
    refused = refused or _refused_layer(layer)
    if any(window is not None and window_size(window) < _LEAST_WINDOW for window in layer.windows):
        refused = f"a sliding window below {_LEAST_WINDOW} tokens"
    if refused is not None:
        raise wrong("draft", f"{stored.folder} is a head with {refused}, whose draft weights are not trained")
    head: EagleHead
    if config.eagle3:
        d2t = tensors.pop("d2t", None)
        tokens = None if d2t is None else _draft_tokens(d2t.dense(), config)
        head = Eagle3Head(config, target, unroll or _EAGLE3_UNROLL, tokens)
    else:
        tensors.pop("embed_tokens.weight", None)
        head = Eagle1Head(config, target, unroll or _EAGLE3_UNROLL, noise=0.0)
    with _errors_name_draft():
        slots = {name: WeightSlot(tuple(p.shape), _copy_to(p.data)) for name, p in head.named_parameters()}
        fill(stored.folder, slots, tensors)
    return head.to(target.lm_head.device)


def _refused_layer(layer: DecoderConfig) -> str | None:
    """Property of a drafter's layers with which its draft weights are not trained; None: there is none."""
    if layer.rope.rope_type != "default":
        return f"rope_scaling of type {layer.rope.rope_type!r}"
    return None if layer.quantization is None else "quantised weights"


def load_blocks(stored: StoredBlocks, target: Target) -> BlockHead:
    """A DFlash or DSpark drafter, in float32, without its confidence head.

    Raises:
        InvalidRequestError: it does not fit the target, or is of a variant that is not trained.
    """
    config, layer = stored.config, stored.config.layer
    flags = (name for name in _REFUSED_BLOCKS if getattr(config, name, False) or getattr(layer, name, False))
    refused = next(flags, None) or _refused_layer(layer)
    if not all(isinstance(window, WholeRow) for window in layer.windows):
        refused = "causal layers"
    elif config.markov_rank and config.markov_head != blocks.MARKOV_HEADS[0]:
        refused = f"a Markov head of kind {config.markov_head!r}"
    elif (stored.folder / blocks.MASK_EMBEDDING).is_file():
        refused = blocks.MASK_EMBEDDING
    if refused is not None:
        raise wrong("draft", f"{stored.folder} is a drafter with {refused}, whose draft weights are not trained")
    head = BlockHead(replace(config, has_confidence=False), target)
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
    with _errors_name_draft():
        fill(
            stored.folder,
            {name: WeightSlot(tuple(p.shape), _copy_to(p.data)) for name, p in head.named_parameters()},
            tensors,
        )
    return head.to(target.lm_head.device)


def _copy_to(weights: Tensor) -> Callable[[Tensor], None]:
    """A loader that copies a tensor into `weights`."""

    def load(tensor: Tensor) -> None:
        weights.copy_(tensor)

    return load


def _draft_tokens(d2t: Tensor, config: EagleConfig) -> list[int]:
    """The target's ids of the draft vocabulary."""
    if d2t.shape != (config.draft_vocab_size,) or d2t.is_floating_point():
        raise wrong("draft", f"d2t is not a list of {config.draft_vocab_size} integers")
    tokens: list[int] = (d2t + torch.arange(len(d2t))).tolist()
    if not all(0 <= token < config.layer.vocab_size for token in tokens):
        raise wrong("draft", f"d2t names tokens beyond the target's {config.layer.vocab_size}")
    return tokens
