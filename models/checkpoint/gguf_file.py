"""GGUF files, llama.cpp's form of a model: config, tokenizer and tensors in one file, read by the package `gguf`.

Matrices of most quantised types stay packed; the others are dequantised one by one when they are loaded.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...platform.core.errors import InvalidRequestError, UnsupportedModelError
from ..families.gguf_families import GGUF_FAMILIES, GgufFamily

if TYPE_CHECKING:
    from ..config import DecoderConfig
    from ..layers.weights import Weight
    from .weight_files import StoredTensor

SUFFIX = ".gguf"
TOKENS = "tokenizer.ggml.tokens"
"""Field with the list of all tokens in the order of their ids."""
_ARCHITECTURE = "general.architecture"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ROPE_DIVISORS = "rope_freqs.weight"

# Keys of config.json by those of a GGUF file, where the architecture's name stands before them.
_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Keys of config.json's `rope_parameters` by those of a GGUF file.
_SCALING_KEYS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Tokens that end a sequence: of a text, of a turn, of a message that awaits a tool's result.
_ENDS = ("eos", "eot", "eom")


def is_gguf(path: str | Path) -> bool:
    """True for the path of a GGUF file, by its name; a directory may be called so too."""
    return str(path).lower().endswith(SUFFIX) and not os.path.isdir(path)


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Content of the config.json that the model of a GGUF file would have.

    Raises:
        InvalidRequestError: the file is damaged, or its package is not installed.
        UnsupportedModelError: an architecture that is not served; `param` is "model".
    """
    with _reading(path):
        reader = _open(path)
        found = _contents(reader)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        prefix = f"{found.get(_ARCHITECTURE)}."
        family = _family(path, found.get(_ARCHITECTURE))
        if found.get("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{path} is one of several parts, which are not read; llama.cpp's gguf-split --merge joins them",
                param="model",
            )
        values = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        config = {theirs: _rounded(values[ours]) for ours, theirs in _KEYS.items() if ours in values}
        if family.neighbours_rotated and "rope.dimension_count" in values:
            config.setdefault("head_dim", values["rope.dimension_count"])
        if family.scored_by_hidden_size and config["num_hidden_layers"] in family.scored_by_hidden_size:
            config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
        elif family.scored_by_hidden_size and "head_dim" in config:
            config["query_pre_attn_scalar"] = config["head_dim"]
        pattern = values.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
        return config | {
            "architectures": [family.architecture],
            "dtype": _dtype({tensor.tensor_type.name for tensor in reader.tensors}),
            "vocab_size": int(tensors[_EMBEDDING].shape[-1]),
            "tie_word_embeddings": _HEAD not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "eos_token_id": [found[key] for end in _ENDS if (key := f"tokenizer.ggml.{end}_token_id") in found],
            "rope_parameters": _rope_parameters(values, tensors, config),
            "sliding_window": config.get("sliding_window"),
        }


def read_gguf(path: Path, names: Iterable[str], config: DecoderConfig) -> dict[str, StoredTensor]:
    """Tensors of a GGUF file by their names in a checkpoint of Hugging Face.

    Args:
        names: Names that the model knows; other tensors keep those of the file.
        config: Config of the model.

    Raises:
        InvalidRequestError: the file is damaged, or its package is not installed.
        UnsupportedModelError: an architecture that is not served.
    """
    with _reading(path):
        import gguf

        from .weight_files import StoredTensor

        reader = _open(path)
        architecture = reader.fields[_ARCHITECTURE].contents()
        family = _family(path, architecture)
        known = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        table = gguf.get_tensor_name_map(known, config.num_layers)
        ours = {table.get_name(name, (".weight", ".bias")): name for name in names}
        tensors = {}
        for tensor in reader.tensors:
            if tensor.name == _ROPE_DIVISORS:  # a part of the config
                continue
            rotated = (
                {".attn_q.": config.num_heads, ".attn_k.": config.num_kv_heads} if family.neighbours_rotated else {}
            )
            heads = next((number for part, number in rotated.items() if part in tensor.name), 0)
            # The converter adds what the model would add to its norms.
            offset = config.norm_offset if tensor.name.endswith("norm.weight") else 0.0
            shape = tuple(int(size) for size in reversed(tensor.shape))
            read = partial(_read_tensor, path, tensor, shape, heads, offset)
            tensors[ours.get(tensor.name, tensor.name)] = StoredTensor(shape, read)
        return tensors


def read_gguf_fields(path: Path) -> dict[str, Any]:
    """Fields of a GGUF file by their names, `TOKENS` among them.

    Raises:
        InvalidRequestError: the file is damaged, has no tokens, or its package is not installed.
    """
    with _reading(path):
        found = _contents(_open(path))
        if not isinstance(found.get(TOKENS), list):
            raise ValueError(f"there is no list {TOKENS}")
        return found


def _family(path: Path, architecture: object) -> GgufFamily:
    family = GGUF_FAMILIES.get(str(architecture))
    if family is None:
        raise UnsupportedModelError(
            f"{path}: unsupported architecture in a GGUF file: {str(architecture)[:80]}; "
            f"supported are {', '.join(sorted(GGUF_FAMILIES))}",
            param="model",
        )
    return family


def _dtype(types: set[str]) -> str:
    """Dtype in which a file is served unless the user says otherwise: its own, bfloat16 for quantised tensors."""
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if not types <= set(plain):
        return "bfloat16"
    return next(name for kind, name in reversed(plain.items()) if kind in types)  # norms are F32 in all files


def _rope_parameters(values: dict[str, Any], tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default"}
    if "rope.freq_base" in values:
        found["rope_theta"] = _rounded(values["rope.freq_base"])
    scaling = values.get("rope.scaling.type", "none")
    if scaling != "none":
        found["rope_type"] = scaling
        found |= {
            theirs: _rounded(values[f"rope.scaling.{ours}"])
            for ours, theirs in _SCALING_KEYS.items()
            if f"rope.scaling.{ours}" in values
        }
    if _ROPE_DIVISORS in tensors:  # of Llama 3: the same ones for all lengths
        divisors = [float(value) for value in tensors[_ROPE_DIVISORS].data.flatten()]
        found |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        found["original_max_position_embeddings"] = config.get("max_position_embeddings")
    return found


def _rounded(value: Any) -> Any:
    """A number of 32 bits as its shortest decimal: 1e-05 is stored as 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read_tensor(path: Path, tensor: Any, shape: tuple[int, ...], num_heads: int, offset: float) -> Weight:
    """The tensor less `offset`; with `num_heads` its rows are ordered for a rotation of halves."""
    import torch

    with _reading(path, f"the tensor {tensor.name}"):
        import gguf
        import numpy as np

        from ..quantization.gguf_blocks import read_blocks

        packed = read_blocks(tensor.tensor_type.name, tensor.data, shape) if len(shape) == 2 and not offset else None
        if packed is not None and not num_heads:
            return packed
        order = np.arange(shape[0])
        if num_heads:
            order = order.reshape(num_heads, shape[0] // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)
        if packed is not None:
            return packed.take(torch.from_numpy(order))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if num_heads:
            values = values[order]
        if offset:
            values = values - np.float32(offset)
        return torch.from_numpy(np.require(values, requirements="W"))


@contextmanager
def _reading(path: Path, what: str = "the file") -> Iterator[None]:
    try:
        yield
    except (InvalidRequestError, UnsupportedModelError):
        raise
    except ImportError as error:
        raise InvalidRequestError(
            f"{path} is read by the package gguf, which is not installed: pip install 'outrider[gguf]'", param="model"
        ) from error
    except Exception as error:  # a damaged file makes the library raise whatever it runs into
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidRequestError(f"{path}: {what} cannot be read as GGUF: {reason}", param="model") from error


def _open(path: Path) -> Any:
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        """The package's reader, which makes an array of each element of an array: seconds for a vocabulary."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = self.data
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            begin = orig_offs + 12
            if kind == GGUFValueType.STRING:
                end = begin
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", data, end)[0]
                values = data[begin:end]
            else:
                values = self._get(begin, self.gguf_scalar_to_np[GGUFValueType(kind)], count)
                end = begin + values.nbytes
            head = data[orig_offs:begin]
            return end - orig_offs, [head, values], [1], [GGUFValueType.ARRAY, GGUFValueType(kind)]

    return Reader(path)


def _contents(reader: Any) -> dict[str, Any]:
    from gguf import GGUFValueType

    of_strings = [GGUFValueType.ARRAY, GGUFValueType.STRING]
    return {
        name: list(_strings(field.parts[-1])) if field.types == of_strings else field.contents()
        for name, field in reader.fields.items()
    }


def _strings(packed: Any) -> Iterator[str]:
    """Elements of an array of strings, each after its length."""
    data, begin = packed.tobytes(), 0
    while begin < len(data):
        begin += 8
        end = begin + struct.unpack_from("<Q", data, begin - 8)[0]
        yield data[begin:end].decode("utf-8")
        begin = end
