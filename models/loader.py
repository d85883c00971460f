"""From a HF directory or hub id to a model that runs."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..platform.core.config import ModelFacts
from ..platform.core.errors import InvalidRequestError, NotFoundError
from .config import DTYPES, read_json, stored_dtype
from .decoder import Decoder
from .layers.embedding import LM_HEAD
from .layers.weights import WeightSlot
from .registry import config_from_hf

INDEX = "model.safetensors.index.json"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
# Draft heads are often published as pickles of tensors.
_HUB_FILES_OF_DRAFTS = ["*.json", "*.safetensors", "*.bin", "*.pt"]
# Buffers that old checkpoints store though they follow from the config.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")
# How many tensor names an error lists of each kind.
_MAX_NAMED = 8


def resolve_model_path(name_or_path: str | Path, *, draft: bool = False) -> Path:
    """A local directory as it is; else a hub id, downloaded (or found in the hub's cache). `draft`: a draft head's.

    Raises:
        NotFoundError: it is neither.
    """
    local = Path(name_or_path).expanduser()
    if local.is_dir():
        return local
    name = str(name_or_path)
    if local.exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise NotFoundError(f"model {name!r}: there is no such directory", param="model")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES_OF_DRAFTS if draft else _HUB_FILES))
    except Exception as error:  # the hub's errors have no common base, and its HTTP library's come through
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFoundError(
            f"model {name!r} is neither a local directory nor a model that could be had from the hub: {reason}",
            param="model",
        ) from error


def read_facts(path: str | Path, served_dtype: str | None = None) -> ModelFacts:
    """What `platform.core.config.resolve` needs to know, from config.json alone; None or "auto": the stored dtype.

    Raises:
        NotFoundError: there is no config.json.
        UnsupportedModelError: a model that is not served.
    """
    raw = read_json(Path(path) / "config.json")
    stored = stored_dtype(raw)
    served = stored if served_dtype in (None, "auto") else served_dtype
    config = config_from_hf(raw, DTYPES[served])
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return ModelFacts(
        path=str(path),
        architecture=config.architecture,
        dtype=stored,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        kv_bytes_per_token=elements * config.dtype.itemsize,
    )


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
) -> Decoder:
    """Build the model of a directory and fill it, tensor by tensor, so that little more than one copy is in memory.

    Args:
        dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
        load_format: "auto": safetensors files; "dummy": random weights from `seed`, config.json suffices.
        progress: show a progress bar on stderr.
        batch_invariant: see `DecoderConfig`.

    Raises:
        NotFoundError: files are missing.
        UnsupportedModelError: a model that is not served.
        InvalidRequestError: the files do not hold the model's tensors; the message names them.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    name = stored_dtype(raw) if dtype == "auto" else dtype
    if name not in DTYPES:
        raise InvalidRequestError(f"dtype must be auto or one of {', '.join(DTYPES)}; got {dtype!r}", param="dtype")
    config = dataclasses.replace(config_from_hf(raw, DTYPES[name]), batch_invariant=batch_invariant)
    model = Decoder(config, device)
    slots = model.weight_slots()
    tensors = _random_tensors(slots, model, seed) if load_format == "dummy" else _stored_tensors(path, slots, model)
    for tensor_name, tensor in tqdm(
        tensors, desc="Loading weights", total=len(slots), disable=not progress, unit="tensor", leave=False
    ):
        slots[tensor_name].load(tensor)
    return model


def _random_tensors(slots: Mapping[str, WeightSlot], model: Decoder, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Weights that keep activations near 1; each tensor depends on the seed and its name alone."""
    for name, slot in slots.items():
        tensor = torch.ones(slot.shape, dtype=model.config.dtype)
        if slot.scale:
            # 32 bits: torch's generator on CPU uses no more of its seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor.normal_(0.0, slot.scale, generator=generator)
        yield name, tensor


def _stored_tensors(path: Path, slots: Mapping[str, WeightSlot], model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The slots' tensors file by file, once the headers of all files have shown that everything is there."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        files = []
        shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InvalidRequestError(
                    f"{file} is not a readable safetensors file: {error}", param="model"
                ) from error
            files.append(opened)
            shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
        ignored = {LM_HEAD} if model.config.tie_word_embeddings else set()
        _check_tensors(path, slots, {n: s for n, s in shapes.items() if n not in ignored and not _COMPUTED.search(n)})
        for opened in files:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                if name in slots:
                    yield name, opened.get_tensor(name)


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory, each once.

    Raises:
        NotFoundError: none, or one that the index names is missing.
        InvalidRequestError: the index is broken.
    """
    if (path / INDEX).exists():
        weight_map: Any = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidRequestError(f"{path / INDEX} has no weight_map", param="model")
        files = [path / name for name in sorted({Path(str(name)).name for name in weight_map.values()})]
    else:
        files = [path / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise NotFoundError(
            f"{path} lacks {', '.join(missing)} (only safetensors checkpoints are read; "
            'load_format="dummy" needs none)',
            param="model",
        )
    return files


def _check_tensors(path: Path, slots: Mapping[str, WeightSlot], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what the files hold with what the model needs.

    Raises:
        InvalidRequestError: names what is missing, unexpected or of the wrong shape.
    """
    problems = {
        "missing": [name for name in slots if name not in shapes],
        "unexpected": [name for name in shapes if name not in slots],
        "of the wrong shape": [
            f"{name} {list(shapes[name])} instead of {list(slot.shape)}"
            for name, slot in slots.items()
            if name in shapes and shapes[name] != slot.shape
        ],
    }
    found = [f"{what}: {_listed(names)}" for what, names in problems.items() if names]
    if found:
        raise InvalidRequestError(
            f"the weights in {path} do not fit its config.json; {'; '.join(found)}", param="model"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
