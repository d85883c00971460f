"""Weights [vocab, hidden] of embeddings and heads in an adapter's file: copies of the base's, trained ones, or rows.

    ….weight, ….modules_to_save.weight           trained as a whole (`modules_to_save`), or a copy that PEFT writes
    ….token_adapter.trainable_tokens_delta       rows of `trainable_token_indices`; no delta: they replace the base's
    ….base_layer.weight, ….original_module.weight    copy of the weight beneath

A vocabulary that was resized for training is larger than the base model's. Then PEFT always writes all these weights,
and the adapter has the rows of the added tokens. Rows that equal the base model's are not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..device.layout import LM_HEAD, SCORE, OwnRows
from .biases import base_bias
from .errors import adapter_error
from .kinds.lora import CLASSIFIERS
from .peft_config import PeftConfig
from .row_conversion import update_digest
from .tensor_file import FLOATS, TensorFile
from .tensor_keys import BIAS, MAGNITUDE, A, B, FileModule, ModelModules, ModuleShape

MAX_ADDED_TOKENS = 1 << 16
"""Largest number of tokens that an adapter adds to the vocabulary. Adapters for another language add some 20,000."""


class SavedKeys(NamedTuple):
    """Keys of one embedding or head in a file; "" if there is none."""

    trained: str = ""
    rows: str = ""
    beneath: str = ""

    @property
    def whole(self) -> str:
        """Key of the whole weight."""
        return self.trained or self.beneath


def saved_keys(saved: Mapping[str, str], file: TensorFile) -> dict[str, SavedKeys]:
    """Group the keys of embeddings and heads by module. `saved` is the module of each key.

    Raises:
        AdapterError: two different weights for one module.
    """
    groups: dict[str, SavedKeys] = {}
    for key, name in saved.items():
        kind = "rows" if "trainable_tokens_delta" in key else "trained"
        if ".base_layer." in key or ".original_module." in key:
            kind = "beneath"
        group = groups.setdefault(name, SavedKeys())
        other = getattr(group, kind)
        # PEFT writes a trained weight twice if the vocabulary was resized.
        if other and (file.shapes[other] != file.shapes[key] or not torch.equal(file.read(other), file.read(key))):
            raise adapter_error(f"two tensors for the same weight: {other} and {key}")
        groups[name] = group._replace(**{kind: key})
    return groups


def resize(modules: Mapping[str, FileModule], groups: Mapping[str, SavedKeys], file: TensorFile) -> None:
    """Give modules with low-rank weights the size of the file's vocabulary, if it is larger than the base's."""
    for name, group in groups.items():
        if name in modules and group.whole:
            module, size = modules[name], _num_rows(file.shapes[group.whole], modules[name].shape)
            if size <= module.shape.vocabulary[0]:
                continue
            if module.shape.embedding:
                module.shape = module.shape._replace(in_features=size)
            else:
                module.shape = module.shape._replace(out_features=size)


class VocabularyReader:
    """Reads the own rows of one file."""

    def __init__(self, file: TensorFile, config: PeftConfig, model: ModelModules) -> None:
        self._file = file
        self._config = config
        self._known, self._dtype = model.shapes, model.layout.dtype

    def read(self, groups: Mapping[str, SavedKeys], modules: dict[str, FileModule]) -> tuple[dict[str, OwnRows], bytes]:
        """Return the adapter's own rows, by module, and their digest.

        Args:
            groups: Keys of each module.
            modules: Modules with low-rank weights. Those of a larger vocabulary are removed from it: their deltas
                become part of the rows.

        Raises:
            AdapterError: a weight is not named in the configuration, is missing, has another shape or is not finite.
        """
        own: dict[str, OwnRows] = {}
        for name, group in groups.items():
            rows = self._read_module(name, group, modules)
            if rows is not None:
                own[name] = self._checked(name, rows)
        self._check_missing(groups, own)
        self._tie(own, modules)
        self._read_bias(own, modules)
        self._check_sizes(own)
        digest = hashlib.sha256(b"own rows")
        for name, (weight, tokens, size, bias) in own.items():
            listed = None if tokens is None else tokens.tolist()
            digest.update(f"{name}|{list(weight.shape)}|{listed}|{size}\n".encode())
            for part in (weight, bias):
                if part is not None:
                    update_digest(digest, part.contiguous().view(torch.uint8).numpy().reshape(-1).data)
        return own, digest.digest()

    def _read_module(self, name: str, group: SavedKeys, modules: dict[str, FileModule]) -> OwnRows | None:
        """Return the rows of a module; None for a copy of the base's weight."""
        if name == SCORE:
            return self._score(group)
        key = group.whole
        added = self._num_added(name, key) if key else 0
        if name in modules and A in modules[name].keys and added:
            return self._merged(modules.pop(name), key)
        whole = self._whole(name, group, added) if key else None
        if group.rows:
            whole = self._with_rows(name, group.rows, whole, added)
        others = modules[name].keys.keys() if name in modules else set()
        if whole is not None and others and (others - {BIAS} or self._config.bias != "none"):
            extra = group.rows or key
            raise adapter_error(f"{name}: a trained weight ({extra}) with other weights of this module is not served")
        return whole

    def _score(self, group: SavedKeys) -> OwnRows | None:
        shape, key = self._known[SCORE], group.trained
        found = self._file.shapes[key] if key else ()
        if found != shape.vocabulary:
            labels, hidden = shape.vocabulary
            raise adapter_error(f"{SCORE}: {list(found)}, expected {[labels, hidden]} ({labels} labels)")
        assert shape.is_base is not None
        weight = self._file.read(key)
        if shape.is_base(weight):
            return None
        if SCORE not in map(_last, self._config.modules_to_save):
            raise adapter_error(f"{SCORE}: the file brings one of its own ({key}): modules_to_save does not name it")
        return OwnRows(weight, None)

    def _num_added(self, name: str, key: str) -> int:
        """Return the number of tokens that a weight has beyond the base's vocabulary."""
        shape = self._known[name]
        added = _num_rows(self._file.shapes[key], shape) - shape.vocabulary[0]
        if added > MAX_ADDED_TOKENS:
            raise adapter_error(f"{name}: {key} adds {added} tokens to the vocabulary; at most {MAX_ADDED_TOKENS}")
        return max(added, 0)

    def _whole(self, name: str, group: SavedKeys, added: int) -> OwnRows | None:
        shape, key = self._known[name], group.whole
        vocab, hidden = shape.vocabulary
        num_rows = _num_rows(self._file.shapes[key], shape)
        assert shape.is_base is not None
        if num_rows >= vocab:
            weight = self._file.read(key)
            if shape.is_base(weight[:vocab]):
                return OwnRows(weight[vocab:], torch.arange(vocab, num_rows), num_rows) if added else None
            if added:
                return OwnRows(weight, None, num_rows)
        is_named = _last(name) in {_last(saved) for saved in self._config.modules_to_save}
        is_named |= self._config.ties_weights and shape.tied
        if is_named and group.trained and num_rows > 0:
            return OwnRows(self._file.read(key), None, num_rows)
        raise adapter_error(
            f"{name}: the file brings a weight of its own ({key}, {list(self._file.shapes[key])}) that is not the "
            f"served model's ({[vocab, hidden]}): "
            f"{'modules_to_save does not name it' if num_rows == vocab else 'the shapes differ'}"
        )

    def _with_rows(self, name: str, key: str, whole: OwnRows | None, added: int) -> OwnRows:
        """Return trained rows, with those of the weight beneath them."""
        vocab, hidden = self._known[name].vocabulary
        index = torch.tensor(self._config.token_indices(name))
        found, size = self._file.shapes[key], vocab + added
        if found != (len(index), hidden) or not all(0 <= token < size for token in index.tolist()):
            raise adapter_error(
                f"{name}: trainable_token_indices of {len(index)} tokens below {size} do not fit {key}, {list(found)}"
            )
        rows = self._file.read(key)
        if whole is not None and whole.tokens is None:
            return whole._replace(weight=whole.weight.index_copy(0, index, rows.to(whole.weight.dtype)))
        if whole is not None:
            assert whole.tokens is not None
            kept = ~torch.isin(whole.tokens, index)
            index = torch.cat((index, whole.tokens[kept]))
            rows = torch.cat((rows, whole.weight[kept].to(rows.dtype)))
        order = index.argsort()
        return OwnRows(rows[order], index[order], size if added else 0)

    def _merged(self, module: FileModule, key: str) -> OwnRows:
        """Return the weight of a larger vocabulary with a low-rank delta added."""
        if MAGNITUDE in module.keys or module.keys.keys() - {A, B}:
            raise adapter_error(f"{module.name}: DoRA and biases are not served with a larger vocabulary")
        a, b = (self._file.read(module.keys[part]) for part in (A, B))
        weight = self._file.read(key)
        if any(part.dtype not in FLOATS for part in (a, b, weight)):
            raise adapter_error(f"{module.name}: a dtype that is not served")
        delta = b.float() @ a.float() * self._config.scale_of(module.configured)
        return OwnRows(weight.float() + (delta.t() if module.shape.embedding else delta), None, len(weight))

    def _checked(self, name: str, rows: OwnRows) -> OwnRows:
        """Return rows in the dtype of use."""
        weight = rows.weight.to(torch.float32 if name == SCORE else self._dtype).contiguous()
        if not rows.weight.is_floating_point() or not bool(torch.isfinite(weight).all()):
            raise adapter_error(f"{name}: its own rows are not finite in {str(self._dtype).removeprefix('torch.')}")
        return rows._replace(weight=weight)

    def _check_missing(self, groups: Mapping[str, SavedKeys], own: Mapping[str, OwnRows]) -> None:
        held = {_last(name) for name in groups}
        for name in self._config.modules_to_save:
            if _last(name) not in held and not (_last(name) in CLASSIFIERS and SCORE in held):
                raise adapter_error(f"modules_to_save names {name[:80]!r}, of which the file has no weight")
        if self._config.has_token_indices and not any(group.rows for group in groups.values()):
            raise adapter_error("trainable_token_indices is set, but the file has no trainable_tokens_delta")

    def _tie(self, own: dict[str, OwnRows], modules: Mapping[str, FileModule]) -> None:
        """Give a tied head the trained rows of the embedding, as PEFT does."""
        trained = next((rows for name, rows in own.items() if self._known[name].embedding), None)
        if trained is None or LM_HEAD in own or not self._known[LM_HEAD].tied:
            return
        if self._config.has_token_indices:
            if LM_HEAD in modules:
                raise adapter_error(
                    f"{LM_HEAD}: an adapter together with trainable_token_indices of the tied embedding"
                )
            own[LM_HEAD] = trained

    def _read_bias(self, own: dict[str, OwnRows], modules: dict[str, FileModule]) -> None:
        """Remove the head's bias from `modules`: it is trained together with the head, or a copy of the base's."""
        head = modules.get(LM_HEAD)
        if head is None or BIAS not in head.keys or self._config.bias != "none":
            return
        key = head.keys[BIAS]
        bias, base = self._file.read(key).to(self._dtype), base_bias(head, self._known[LM_HEAD]).to(self._dtype)
        if LM_HEAD in own and own[LM_HEAD].tokens is not None:
            raise adapter_error(f"{LM_HEAD}: a bias ({key}) together with rows of some tokens is not served")
        if LM_HEAD in own:
            own[LM_HEAD] = own[LM_HEAD]._replace(bias=self._checked(LM_HEAD, OwnRows(bias, None)).weight)
        elif not torch.equal(bias, base):
            if LM_HEAD in map(_last, self._config.modules_to_save):
                return  # the weight is the base's: the bias alone was trained
            raise adapter_error(
                f"{LM_HEAD}: the file brings a bias of its own ({key}): modules_to_save does not name it"
            )
        del head.keys[BIAS]
        if not head.keys:
            del modules[LM_HEAD]

    def _check_sizes(self, own: Mapping[str, OwnRows]) -> None:
        """Refuse a head with tokens that the embedding lacks."""
        if not own or LM_HEAD not in self._known:
            return
        table = next(name for name, shape in self._known.items() if shape.embedding)
        vocab = self._known[table].in_features
        sizes = [max(vocab, own[name].vocab_size) if name in own else vocab for name in (table, LM_HEAD)]
        if sizes[1] > sizes[0]:
            raise adapter_error(f"{LM_HEAD} has {sizes[1]} tokens, and {table} only {sizes[0]}")


def _last(name: str) -> str:
    """Return the last part of a module's name, with the usual name for a head."""
    last = name.rpartition(".")[2]
    return LM_HEAD if last == "embed_out" else last


def _num_rows(found: tuple[int, ...], shape: ModuleShape) -> int:
    """Return the number of tokens of a weight [n, hidden]; 0 for any other shape."""
    return found[0] if len(found) == 2 and found[1] == shape.vocabulary[1] else 0
