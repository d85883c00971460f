"""Loading of a model from a HF directory, a hub id or a GGUF file."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ...kernels.memory import weight_memory
from ...platform.core.config import ModelFacts
from ...platform.core.errors import InvalidRequestError
from ..batch import kv_dtype
from ..config import DTYPES, DecoderConfig, stored_dtype
from ..decoder import Decoder
from ..families import find_traits
from ..families.multimodal import OUTER, language_name
from ..implementation import AUTO, build_model, read_config
from ..layers.cache_scales import scale_slots
from ..layers.weights import RenamedSlot, WeightSlot
from ..model import LanguageModel, ModelConfig
from ..parallel import Ranks, divided_decoder, rank_config
from ..quantization import unpack
from ..quantization.rounding import choose_rounding, round_int8
from ..states.layers import state_specs
from ..transformers_model.model import TransformersModel
from .gguf_file import is_gguf, read_gguf
from .json_files import read_model_config
from .mxfp4 import unpacked
from .weight_files import StoredTensor, load_into, misfits, read_weights

log = logging.getLogger(__name__)

# Elements from which a random tensor is drawn on its device: a CPU needs a minute for some billions.
_DRAWN_ON_DEVICE = 1 << 20
_NO_WEIGHTS = ' (load_format="dummy" needs none)'
# Name of the model within the causal one: checkpoints of the inner model lack it.
_PREFIXES = ("model.", "transformer.", "gpt_neox.")
# Scales of keys, values, queries and attention's probabilities, for caches that divide by them.
_CACHE_SCALE = re.compile(r"\.(?:[kqv]|kv|prob)_scale$|\.[kv]_proj\.output_scale$")
# Buffers that old checkpoints store although they follow from the config, and layers that predict further tokens.
_UNUSED = re.compile(r"^(?:model\.)?mtp[._]|\.rotary_emb\.inv_freq$|\.(?:attn|attention)\.(?:masked_)?bias$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


NameOf = Callable[[str], str | None]
"""Function from a tensor's name in the files to the model's; None: the model does not have it."""


class ModelOptions(NamedTuple):
    """Options of a model in addition to its sizes and paths."""

    impl: str = AUTO
    """See `models.implementation.read_config`."""
    quantization: str | None = None
    """One of `ROUNDINGS`, by which full-precision weights are quantised; None: they stay as they are stored."""
    ranks: Ranks | None = None
    """Processes that compute the model together, of which this is one; None: this one alone."""


DEFAULT_OPTIONS = ModelOptions()


def read_facts(
    path: str | Path,
    served_dtype: str | None = None,
    kv_cache_dtype: str = "auto",
    impl: str = AUTO,
    num_ranks: int = 1,
) -> ModelFacts:
    """Facts about a model for `platform.core.config.resolve`, from config.json or the head of a GGUF file alone.

    `served_dtype` None or "auto" means the stored dtype; for `kv_cache_dtype` see `models.batch.kv_dtype`. With several
    ranks the KV is that of one of them.

    Raises:
        NotFoundError: there is no config.json.
        UnsupportedModelError: a model that is not served.
        InvalidRequestError: the model cannot be divided by `num_ranks`.
    """
    raw = read_model_config(path)
    stored = stored_dtype(raw)
    served = stored if served_dtype in (None, "auto") else served_dtype
    config = read_config(raw, DTYPES[served], impl)
    if num_ranks > 1:
        config = rank_config(config, num_ranks)
    is_shared = isinstance(config, DecoderConfig) and config.latent is not None
    shapes = [(config.num_kv_heads, config.head_dim)] * config.num_layers
    shapes = config.kv_shapes if isinstance(config, DecoderConfig) else shapes
    elements = (1 if is_shared else 2) * sum(heads * size for heads, size in shapes)
    states = state_specs(config.states) if isinstance(config, DecoderConfig) else []
    return ModelFacts(
        path=str(path),
        architecture=config.architecture,
        dtype=stored,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        kv_bytes_per_token=elements * kv_dtype(config.dtype, kv_cache_dtype).itemsize,
        state_bytes=sum(spec.num_bytes(config.dtype) for spec in states),
        quantization=find_quantization(path, config),
    )


def find_quantization(path: str | Path, config: ModelConfig) -> str | None:
    """Method by which the weights in `path` are quantised; None: they are not."""
    if config.quantization is not None:
        return config.quantization.method
    return "gguf" if is_gguf(path) else None


def quantization_name(path: str | Path, config: ModelConfig, rounded: str | None = None) -> str:
    """Text for people about the form of the weights; "": they are not quantised. `rounded`: as `quantization` of
    `load_model`."""
    if rounded is not None:
        return f"{rounded} (rounded while loading)"
    if config.quantization is not None:
        return config.quantization.name
    return find_quantization(path, config) or ""


@torch.inference_mode()
def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    *,
    progress: bool = False,
    seed: int = 0,
    batch_invariant: bool = False,
    options: ModelOptions = DEFAULT_OPTIONS,
) -> LanguageModel:
    """Build the model of a directory and fill it, tensor by tensor, so that little more than one copy is in memory.

    Args:
        dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
        load_format: "auto": the GGUF file, or safetensors files, else pickles of tensors; "dummy": random weights from
            `seed`, of which config.json suffices.
        progress: show a progress bar on stderr.
        batch_invariant: see `DecoderConfig`.

    Raises:
        NotFoundError: files are missing.
        UnsupportedModelError: a model that is not served.
        InvalidRequestError: the files do not hold the model's tensors; the message names them.
    """
    path = Path(path)
    raw = read_model_config(path)
    name = stored_dtype(raw) if dtype == "auto" else dtype
    if name not in DTYPES:
        raise InvalidRequestError(f"dtype must be auto or one of {', '.join(DTYPES)}; got {dtype!r}", param="dtype")
    if OUTER in raw:
        log.info("%s is a %s, served as a text model: its vision tower is not loaded", path, raw[OUTER])
    weights = None if load_format == "dummy" else path
    config = served_config(raw, DTYPES[name], options, weights, batch_invariant=batch_invariant)
    model = build_unfilled(config, device, options, single_copy=find_quantization(path, config) is not None)
    slots = model.weight_slots()
    tensors = (
        _random_tensors(slots, model, seed)
        if load_format == "dummy"
        else stored_tensors(path, slots, model, config, names_of(raw))
    )
    shown = tqdm(tensors.items(), desc="Loading weights", disable=not progress, unit="tensor", leave=False)
    with weight_memory.of_model():
        for tensor_name, tensor in shown:
            load_into(slots[tensor_name], tensor_name, tensor, "model")
            if (remember := slots[tensor_name].remember) is not None:
                remember(tensor.read)
    return model


def names_of(raw: Mapping[str, Any]) -> NameOf:
    """Function from tensors' names in the files of a model with this config.json to the model's."""
    return language_name if OUTER in raw else str


def served_config(
    raw: Mapping[str, Any], dtype: torch.dtype, options: ModelOptions, weights: Path | None, *, batch_invariant: bool
) -> ModelConfig:
    """Config with which a model is served.

    Args:
        raw: config.json.
        weights: the folder or file of its weights, which may have a head that config.json does not know; None: there
            are none.
    """
    config = read_config(raw, dtype, options.impl)
    if weights is not None and config.tie_word_embeddings and _has_own_head(weights, config, names_of(raw)):
        log.warning("%s has an lm_head of its own, which is used although its config.json ties it", weights)
        config = read_config({**raw, "tie_word_embeddings": False}, dtype, options.impl)
    return dataclasses.replace(config, batch_invariant=batch_invariant)


def build_unfilled(
    config: ModelConfig, device: torch.device | str, options: ModelOptions, *, single_copy: bool
) -> LanguageModel:
    """Model, or this process's share of it, whose weight slots are still to be filled. `single_copy`: see
    `Embedding`."""
    if options.ranks is not None:
        assert isinstance(config, DecoderConfig), "`read_facts` refuses others"
        model: LanguageModel = divided_decoder(config, options.ranks, device)
    else:
        model = build_model(config, device)
    if options.quantization is not None:
        for linear in model.linears():
            linear.quantize = choose_rounding(linear, options.quantization, config.hidden_size)
        model.embedding.quantize = round_int8
    model.embedding.single_copy = single_copy
    return model


def _has_own_head(path: Path, config: ModelConfig, name_of: NameOf) -> bool:
    """True for a folder with a head that is none of the other tensors of its shape. Then config.json is wrong, for
    transformers 5 too: the head was trained apart from the embeddings."""
    block, is_classifier = (config.block, config.score) if isinstance(config, DecoderConfig) else (None, None)
    if is_gguf(path) or is_classifier:
        return False
    stored = {name_of(name): tensor for name, tensor in read_weights(path, "model", hint=_NO_WEIGHTS).items()}
    stored.pop(None, None)
    head = stored.pop(f"{block.head if block else 'lm_head'}.weight", None)
    if head is None:
        return False
    weight = head.dense().to(config.dtype)
    others = [tensor for tensor in stored.values() if tensor.shape == head.shape]
    return bool(others) and not any(torch.equal(tensor.dense().to(config.dtype), weight) for tensor in others)


def _random_tensors(slots: Mapping[str, WeightSlot], model: LanguageModel, seed: int) -> dict[str, StoredTensor]:
    """Random weights that keep activations near 1. Each tensor depends on the seed and its name alone; a large one also
    on the kind of device, which draws it."""
    dtype, device = model.config.dtype, model.device
    return {
        name: StoredTensor(slot.shape, functools.partial(_random, name, slot, dtype, seed, device))
        for name, slot in slots.items()
    }


def _random(name: str, slot: WeightSlot, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    where = device if math.prod(slot.shape) >= _DRAWN_ON_DEVICE else torch.device("cpu")
    tensor = torch.ones(slot.shape, dtype=dtype, device=where)
    if slot.scale:
        # 32 bits: torch's generator on a CPU uses no more of its seed.
        generator = torch.Generator(where).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        tensor.normal_(0.0, slot.scale, generator=generator)
    return tensor


def stored_tensors(
    path: Path,
    slots: dict[str, WeightSlot],
    model: LanguageModel,
    config: ModelConfig,
    name_of: NameOf,
    *,
    partial: bool = False,
) -> dict[str, StoredTensor]:
    """Tensors of all slots in the order of the files, for the model of `config`, of which `model` may be a share. The
    headers of all files are checked first. `slots` is mutated when the files have other names than usual. With
    `partial` tensors may be missing.

    Raises:
        NotFoundError: a file is missing.
        InvalidRequestError: a file is damaged, or tensors are missing, unexpected or of the wrong shape.
    """
    renamed: dict[str, RenamedSlot] = model.renamed_slots() if isinstance(model, Decoder) else {}
    if is_gguf(path):
        if not isinstance(config, DecoderConfig):
            raise InvalidRequestError("model_impl transformers does not go with a GGUF file", param="model_impl")
        others = model.unused_tensors() if isinstance(model, Decoder) else set()
        tensors = read_gguf(path, [*slots, *others], config)
    else:
        read = read_weights(path, "model", hint=_NO_WEIGHTS)
        kept = {name: tensor for name, tensor in read.items() if name_of(name) and not _is_unused(name, config)}
        tensors = unpacked(kept, config.dtype)
        form = config.quantization
        if form is not None and not (partial and not any(name.endswith(form.endings) for name in tensors)):
            tensors = unpack(
                tensors,
                form,
                lambda name: _with_prefix(name_of(name) or name, slots) in slots,
                "model",
                transposed=isinstance(config, DecoderConfig) and config.block is not None and config.block.transposed,
            )
        tensors = {name_of(name) or name: tensor for name, tensor in tensors.items()}
    table, head = (f"{name}.weight" for name in (model.embedding.names.table, model.embedding.names.head))
    is_tied = config.tie_word_embeddings
    # save_model of safetensors keeps one name of a tensor that has two.
    if is_tied and head in tensors and not any(_with_prefix(name, slots) == table for name in tensors):
        tensors = {table if name == head else name: tensor for name, tensor in tensors.items()}
    if isinstance(model, TransformersModel):
        tensors = model.by_slot(tensors)
    use_renamed(slots, tensors, renamed)
    tensors = {_with_prefix(name, slots): tensor for name, tensor in tensors.items()}
    ignored = ({head} if is_tied else set()) | (model.unused_tensors() if isinstance(model, Decoder) else set())
    scales = {name: tensor.shape for name, tensor in tensors.items() if _CACHE_SCALE.search(name) and name not in slots}
    slots |= scale_slots(scales, model.cache_scales() if isinstance(model, Decoder) else {})
    unused = [name for name in scales if name not in slots]
    if unused:
        log.warning("%s has %d scales of attention that are not used, such as %s", path, len(unused), unused[0])
        tensors = {name: tensor for name, tensor in tensors.items() if name not in unused}
    shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in ignored}
    wanted = {name: slot for name, slot in slots.items() if name in shapes} if partial else slots
    problems = misfits(wanted, shapes)
    if problems:
        raise InvalidRequestError(f"the weights in {path} do not fit its config.json; {problems}", param="model")
    return {name: tensor for name, tensor in tensors.items() if name in slots}


def use_renamed(
    slots: dict[str, WeightSlot], tensors: dict[str, StoredTensor], renamed: Mapping[str, RenamedSlot]
) -> None:
    """Replace slots by those of the stored tensors that stand for them. `slots` and `tensors` are mutated."""
    for name, other in renamed.items():
        if name in tensors:
            tensors[name] = _turned(tensors[name], other.slot.shape)
            for replaced in other.replaced:
                del slots[replaced]
            slots[name] = other.slot


def _is_unused(name: str, config: ModelConfig) -> bool:
    """True for a tensor of a checkpoint that is not loaded."""
    if _UNUSED.search(name):
        return True
    if not isinstance(config, DecoderConfig):
        return False
    traits, layer = find_traits(config.architecture), _LAYER.search(name)
    is_extra = layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_extra_layers
    return is_extra or bool(traits and traits.unused and re.search(traits.unused, name))


def _turned(stored: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """Tensor of all experts, whose last two sizes some files have swapped (Qwen3-VL-MoE)."""
    swapped = (*shape[:-2], *shape[:-3:-1])
    return StoredTensor(shape, lambda: stored.dense().mT) if stored.shape == swapped != shape else stored


def _with_prefix(name: str, slots: Mapping[str, WeightSlot]) -> str:
    """Name of the slot of a stored tensor, whose name may lack the inner model's; `name` itself when there is none."""
    usual = re.sub(r"^backbone\.", "model.", name)
    return next((found for prefix in ("", *_PREFIXES) if (found := prefix + usual) in slots), name)
