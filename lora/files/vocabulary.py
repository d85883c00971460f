"""Weights [vocab, hidden] of embeddings and heads in an adapter's file: copies of the base's, trained ones, or rows.

PEFT saves copies of the base weights beside an adapter on them, whole matrices for `modules_to_save`, and rows for
`trainable_token_indices`. It stores the latter as a "delta", which is none: the rows replace the base's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from ..device.layout import LM_HEAD, OwnRows
from .peft_config import PeftConfig, adapter_error
from .row_conversion import update_digest
from .tensor_file import TensorFile
from .tensor_keys import FileModule, ModuleShape

_ROWS = "trainable_tokens_delta"


def read_own_rows(
    saved: Mapping[str, str],
    modules: Mapping[str, FileModule],
    file: TensorFile,
    config: PeftConfig,
    known: Mapping[str, ModuleShape],
    dtype: torch.dtype,
) -> tuple[dict[str, OwnRows], bytes]:
    """Return the rows that an adapter brings itself, by module, and their digest. Copies of base weights are no rows.

    Args:
        saved: Module of each key of the file.
        modules: Modules with low-rank weights.
        file: The open file.
        config: The adapter's configuration.
        known: The model's modules.
        dtype: Dtype of use.

    Raises:
        AdapterError: a weight that the configuration does not name, is missing, has another shape or is not finite.
    """
    own: dict[str, OwnRows] = {}
    digest = hashlib.sha256(b"own rows")
    for key, name in saved.items():
        rows = _read_rows(key, name, file, config, known[name])
        if rows is None:
            continue
        if name in modules or name in own:
            raise adapter_error(f"{name}: a trained weight ({key}) beside other weights of this module is not served")
        weight = rows.weight.to(dtype).contiguous()
        if not rows.weight.is_floating_point() or not bool(torch.isfinite(weight).all()):
            raise adapter_error(f"{name}: {key} is not finite in {str(dtype).removeprefix('torch.')}")
        own[name] = OwnRows(weight, rows.tokens)
        digest.update(f"{name}|{list(weight.shape)}|{None if rows.tokens is None else rows.tokens.tolist()}\n".encode())
        update_digest(digest, weight.view(torch.uint8).numpy().reshape(-1).data)
    _check_missing(saved, own, config)
    trained = next((rows for name, rows in own.items() if known[name].embedding and rows.tokens is not None), None)
    if trained is not None and LM_HEAD not in own and known[LM_HEAD].tied:
        if LM_HEAD in modules:
            raise adapter_error(f"{LM_HEAD}: an adapter beside trainable_token_indices of the tied embedding")
        own[LM_HEAD] = trained  # PEFT trains the rows of both
    return own, digest.digest()


def _read_rows(key: str, name: str, file: TensorFile, config: PeftConfig, shape: ModuleShape) -> OwnRows | None:
    """Return the rows of a key; None for a copy of the base's weight."""
    vocab, hidden = (
        (shape.in_features, shape.out_features) if shape.embedding else (shape.out_features, shape.in_features)
    )
    found = file.shapes[key]
    if _ROWS in key:
        index = config.token_indices(name)
        if found != (len(index), hidden) or not all(0 <= token < vocab for token in index):
            raise adapter_error(
                f"{name}: trainable_token_indices of {len(index)} tokens below {vocab} do not fit {key}, {list(found)}"
            )
        order = torch.tensor(index).argsort()
        return OwnRows(file.read(key)[order], torch.tensor(index)[order])
    is_named = name.rpartition(".")[2] in {saved.rpartition(".")[2] for saved in config.modules_to_save}
    is_named |= config.ties_weights and shape.tied
    num_rows = found[0] if len(found) == 2 and found[1] == hidden else 0
    if num_rows == vocab and shape.is_base is not None and shape.is_base(file.read(key)):
        return None
    if is_named and 0 < num_rows <= vocab:
        return OwnRows(file.read(key), None)
    why = "its vocabulary is larger, which is not served" if num_rows > vocab else "the shapes differ"
    raise adapter_error(
        f"{name}: the file brings a weight of its own ({key}, {list(found)}) that is not the served model's "
        f"({[vocab, hidden]}): {'modules_to_save does not name it' if num_rows == vocab else why}"
    )


def _check_missing(saved: Mapping[str, str], own: Mapping[str, OwnRows], config: PeftConfig) -> None:
    held = {name.rpartition(".")[2] for name in saved.values()}
    for name in config.modules_to_save:
        if name.rpartition(".")[2] not in held:
            raise adapter_error(f"modules_to_save names {name[:80]!r}, of which the file has no weight")
    if config.has_token_indices and not any(rows.tokens is not None for rows in own.values()):
        raise adapter_error("trainable_token_indices is set, but the file has no trainable_tokens_delta")
