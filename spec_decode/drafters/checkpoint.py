"""Reads the weight files of draft heads: safetensors, whole or sharded, and pickles that contain only tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.checkpoint.weight_files import StoredTensor, load_into, misfits, read_pickle, read_weights
from ...models.layers.linear import Linear
from ...models.layers.weights import WeightSlot
from ...models.quantization.rounding import choose_rounding
from ...platform.core.errors import InvalidRequestError
from ...platform.core.quantization import rounding
from ...platform.core.speculative_config import SpeculativeConfig
from ..verify.draft_sampling import DraftVocabulary

if TYPE_CHECKING:
    from .factory import DrafterContext

__all__ = [
    "StoredTensor",
    "draft_rounding",
    "draft_vocabulary",
    "fill",
    "fill_randomly",
    "quantise",
    "read_tensor",
    "read_tensors",
    "refuse",
]

PARAM = "speculative_config"
"""The field that all errors are about."""
# Tensors that are no weights: the target's token ids, as offsets.
_TABLES = ("d2t",)


def check_shared(drafter: str, hidden_size: int, target: int, *, own_embedding: bool, own_head: bool) -> None:
    """Refuse a drafter that shares the target's embedding or output head and has another hidden size.

    Args:
        drafter: its kind, for the message.
        hidden_size, target: hidden sizes of the drafter and of the target.

    Raises:
        InvalidRequestError: with both sizes.
    """
    if hidden_size != target and not (own_embedding and own_head):
        missing = "lm_head" if own_embedding else "embed_tokens"
        raise refuse(
            f"the {drafter} has no {missing}.weight, and its hidden size {hidden_size} is not the target's {target}: "
            "it cannot share the target's"
        )


def refuse(message: str) -> InvalidRequestError:
    """The error for an unusable draft."""
    return InvalidRequestError(f"{PARAM}: {message}", param=PARAM)


def read_tensors(path: Path, extra: Sequence[str] = ()) -> dict[str, StoredTensor]:
    """All tensors of a head's directory by the names in the files.

    Args:
        path: the directory.
        extra: file names that are looked for after the usual ones, such as "medusa_lm_head.pt".

    Raises:
        NotFoundError: there are no weights.
        InvalidRequestError: a file is broken, or is a pickle of other things than tensors.
    """
    return read_weights(path, PARAM, extra=extra)


def read_tensor(file: Path) -> Tensor:
    """The dense tensor of a pickle: itself, or the only one among an object's values.

    Raises:
        InvalidRequestError: there is not one tensor, it has no values or is sparse, or the file is damaged.
    """
    found = read_pickle(file, PARAM)
    values = found.values() if isinstance(found, Mapping) else [found]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) != 1:
        raise refuse(f"{file} must hold one tensor, got {len(tensors)}")
    if tensors[0].layout is not torch.strided or tensors[0].is_meta:
        raise refuse(f"{file} must hold a dense tensor, got one that is sparse or has no values")
    return tensors[0]


def draft_rounding(config: SpeculativeConfig, context: DrafterContext, stored: str | None) -> str | None:
    """Method by which a drafter's weights are quantised while loading; `stored` is that of its files.

    Raises:
        InvalidRequestError: `config` names another method than the files have, or an unknown one.
    """
    if config.quantization is None and stored is None:
        return context.quantization
    return rounding(config.quantization, stored, PARAM)


def quantise(linears: Iterable[Linear], config: SpeculativeConfig, context: DrafterContext, stored: str | None) -> None:
    """Let layers quantise the weights that will be loaded; see `draft_rounding`."""
    method = draft_rounding(config, context, stored)
    if method is not None:
        for linear in linears:
            linear.quantize = choose_rounding(linear, method, context.target.config.hidden_size)


@torch.inference_mode()
def fill(path: Path, slots: Mapping[str, WeightSlot], tensors: Mapping[str, StoredTensor]) -> None:
    """Load `tensors` into the `slots` of the same names.

    Raises:
        InvalidRequestError: names tensors that are missing, unexpected, of the wrong shape, with both shapes, or no
        weights.
    """
    problems = misfits(slots, {name: tensor.shape for name, tensor in tensors.items()})
    if problems:
        raise refuse(f"the weights in {path} do not fit its config.json or the target; {problems}")
    for name, slot in slots.items():
        load_into(slot, name, tensors[name], PARAM, integers=name in _TABLES)


def draft_vocabulary(offsets: Tensor, size: int, device: torch.device) -> DraftVocabulary | None:
    """Vocabulary of a head whose token i is the target's i + offsets[i] (`d2t`); None: the target's `size` tokens.

    Raises:
        InvalidRequestError: it maps to tokens that the target lacks, or several to one.
    """
    ids = torch.arange(len(offsets)) + offsets.cpu().long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise refuse(f"d2t of the head maps to token {wrong}, the target's vocabulary has {size} tokens")
    if len(ids.unique()) != len(ids):
        raise refuse(f"d2t of the head maps its {len(ids)} tokens to {len(ids.unique())}: some are mapped to the same")
    return DraftVocabulary(ids.to(device), size) if len(ids) < size or bool(offsets.any()) else None


@torch.inference_mode()
def fill_randomly(slots: Mapping[str, WeightSlot], seed: int) -> None:
    """Random weights that keep activations near 1; each tensor depends on the seed and its name alone."""
    for name, slot in slots.items():
        tensor = torch.ones(slot.shape)
        if slot.scale:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor.normal_(0.0, slot.scale, generator=generator)
        slot.load(tensor)
