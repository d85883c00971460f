"""Configuration of a head for multi-token prediction: one layer of the target's family, from the checkpoint's files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....models.batch import KVLayerSpec, kv_dtype
from ....models.checkpoint.gguf_file import is_gguf, read_gguf_head
from ....models.checkpoint.json_files import read_model_config
from ....models.config import DTYPES, DecoderConfig
from ....models.decoder import Decoder
from ....models.families import FAMILIES, find_traits
from ....models.families.multimodal import OUTER, language_name
from ....models.families.prediction import PredictionHead
from ....models.implementation import read_config
from ....models.quantization import unpack
from ..checkpoint import PARAM, StoredTensor, read_tensors, refuse

if TYPE_CHECKING:
    from ....models.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """A head."""

    layer: DecoderConfig
    """The family's decoder with the head's layers alone, of which the first has attention."""
    num_target_layers: int
    form: PredictionHead
    aux_layers: tuple[int, ...] = ()
    """None: the head reads the target's hidden states after the final norm."""

    @property
    def draft_vocab_size(self) -> int:
        """The target's vocabulary: the head has no other."""
        return self.layer.vocab_size

    @property
    def kv_layer(self) -> KVLayerSpec:
        """KV that the layer keeps of a token."""
        layer = self.layer
        return KVLayerSpec(layer.num_kv_heads, layer.head_dim, shared=layer.latent is not None)


def read_mtp_config(path: Path, dtype: torch.dtype, target: ModelConfig | None = None) -> MtpConfig:
    """Configuration of the first head of a checkpoint, from its config.json.

    Raises:
        InvalidRequestError: its family has no such heads, or it does not fit the target; with both figures.
        NotFoundError, UnsupportedModelError: as for any model.
    """
    config = read_config(read_model_config(path), dtype)
    traits = find_traits(config.architecture) if isinstance(config, DecoderConfig) else None
    if not isinstance(config, DecoderConfig) or traits is None or traits.prediction is None:
        served = ", ".join(name for name, known in FAMILIES.items() if known.prediction is not None)
        raise refuse(
            f"method mtp: heads for multi-token prediction are not read from {config.architecture}; served are {served}"
        )
    if is_gguf(path) and traits.prediction.second_layer is not None:
        raise refuse(f"method mtp: heads of {config.architecture} are not read from GGUF files")
    if target is not None:
        for field in ("hidden_size", "vocab_size"):
            own, wanted = getattr(config, field), getattr(target, field)
            if own != wanted:
                raise refuse(f"{field} of {path} is {own}, the target's {wanted}")
    if config.hidden_size % 2:
        raise refuse(f"hidden_size {config.hidden_size} of {path} is odd")
    form, experts = traits.prediction, config.experts
    count = max(1, len(form.mixers))
    if experts is not None:
        experts = dataclasses.replace(experts, layers=frozenset({count - 1}) if experts.layers else frozenset())
    layer = dataclasses.replace(
        config,
        num_layers=count,
        windows=config.windows[-1:] * count,
        layer_ropes=(),
        states=None,
        mixers=form.mixers,
        experts=experts,
    )
    return MtpConfig(layer=layer, num_target_layers=config.num_layers, form=form)


def mtp_kv_bytes_per_token(path: Path, dtype_name: str, kv_cache_dtype: str = "auto") -> int:
    """Bytes a token of a head's own KV and of the hidden states that it keeps, from config.json alone.

    Raises:
        InvalidRequestError, NotFoundError, UnsupportedModelError: see `read_mtp_config`.
    """
    dtype = DTYPES[dtype_name]
    config = read_mtp_config(path, dtype)
    kv_bytes = config.kv_layer.num_elements * kv_dtype(dtype, kv_cache_dtype).itemsize
    return kv_bytes + config.layer.hidden_size * dtype.itemsize


def head_tensors(path: Path, config: MtpConfig) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint's first head by their canonical names, without copies of the target's.

    Raises:
        InvalidRequestError: the checkpoint has none; the message names a tensor that is missing.
        NotFoundError: there are no weights.
    """
    if is_gguf(path):
        return _gguf_head(path, config)
    stored = read_tensors(path)
    if OUTER in read_model_config(path):
        stored = {language_name(name) or name: tensor for name, tensor in stored.items()}
    names = config.form.canonical_names(stored, config.num_target_layers)
    if not names:
        missing = config.form.projection.format(head=0, layer=config.num_target_layers)
        raise refuse(
            f"method mtp needs a head for multi-token prediction, and {path} has none: {missing}.weight is missing"
        )
    traits = find_traits(config.layer.architecture)
    unused = re.compile(traits.unused) if traits is not None and traits.unused else None
    found = {
        ours: stored[name]
        for name, ours in names.items()
        if ours is not None and not (unused is not None and unused.search(name))
    }
    form = config.layer.quantization
    if form is not None and any(name.endswith(form.endings) for name in found):
        found = unpack(found, form, lambda _: True, PARAM)
    return found


def _gguf_head(path: Path, config: MtpConfig) -> dict[str, StoredTensor]:
    layer, index = config.layer, config.num_target_layers
    forms = [layer] if layer.experts is None else [layer, with_tensors(config, ()).layer]
    names = {name for form in forms for name in Decoder(form, "meta").layers[0].weight_slots()}
    found = read_gguf_head(path, names, layer, index)
    if not found:
        raise refuse(
            f"method mtp needs a head for multi-token prediction, and {path} has none: a tensor of blk.{index}.nextn "
            "is missing"
        )
    return found


def with_tensors(config: MtpConfig, names: Collection[str]) -> MtpConfig:
    """`config` with experts if the `names` of the head's tensors show some."""
    if config.layer.experts is None:
        return config
    layers = config.layer.experts.layers if any(".experts." in name for name in names) else frozenset()
    experts = dataclasses.replace(config.layer.experts, layers=layers)
    return dataclasses.replace(config, layer=dataclasses.replace(config.layer, experts=experts))
