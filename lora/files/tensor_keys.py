"""Maps keys of a PEFT file to the model's modules: prefixes, wrappers, adapter names, merged projections.

base_model.model.model.layers.3.mlp.up_proj.lora_A.default.weight
|  wrappers     | module as configured     | part | the adapter's name
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor

from ...platform.core.errors import AdapterError
from ..device.dora import BaseWeight
from ..device.layout import LM_HEAD, SCORE, ModelLayout
from ..step_yield import yield_to_steps
from .errors import adapter_error
from .tensor_header import FileLimits

T = TypeVar("T")

# Parts of a module's weights.
A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
LORA_BIAS, BIAS = "lora_B.bias", "bias"

_KEY = re.compile(
    r"^(?P<module>.+?)\.(?:"
    r"(?P<linear>lora_[AB])(?:\.[^.]+)?\.weight"
    r"|lora_embedding_(?P<embedding>[AB])(?:\.[^.]+)?"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.[^.]+)?(?:\.weight)?"
    r"|lora_B(?:\.[^.]+)?\.(?P<lora_bias>bias)"
    r"|(?:(?:base_layer|modules_to_save(?:\.[^.]+)?)\.)?(?P<bias>bias))$"
)
# PEFT's save_pretrained copies the base weights of an adapted embedding or head into the adapter's file; a trained one
# (modules_to_save) has the same key. See `vocabulary`.
_SAVED = re.compile(
    r"^(?P<module>.+?)(?:"
    r"(?:(?:\.token_adapter)?\.base_layer|\.original_module|\.modules_to_save(?:\.[^.]+)?)?\.weight"
    r"|(?:\.token_adapter)?\.trainable_tokens_delta(?:\.[^.]+)?)$"
)
# State of VeLoRA's and MonteCLoRA's training, which their adapters do not need any more.
_TRAINING_STATE = re.compile(r"\.lora_(?:velora|monteclora)_")
# Wrappers that PEFT, torch.compile, FSDP, checkpointing and DDP put around a model while it is trained.
_WRAPPERS = ("base_model.model.", "base_model.")
_TRAINING_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^module\."
)
# Name of the model within the causal one; PEFT may have wrapped it alone.
_INNER = ("", "model.", "transformer.", "gpt_neox.")
# The text model in a multimodal one.
_TEXT_MODEL = re.compile(r"(^|\.)(?:language_model|text_model)\.")
_REFUSED_KEYS = (
    (re.compile(r"\.lora_magnitude_vector"), "DoRA is not served here"),
    (re.compile(r"\.bias$"), "a trained bias is served only for a linear module"),
    (re.compile(r"(^|\.)(lora_embedding_[AB]|embed_tokens)(\.|$)"), "an adapter on the embedding is not served"),
    (re.compile(r"(^|\.)lm_head\."), "an adapter on lm_head is not served"),
    (re.compile(r"(^|\.)(score|classifier)\."), "a score matrix is served whole, for a classifier"),
    (re.compile(r"\.lora_[ab]\.weight$"), "torchtune's own names; its Hugging Face checkpointer writes PEFT's"),
    (re.compile(r"\.linear_(in|out)\."), "NeMo's own names; llm.export_ckpt with target='hf-peft' writes PEFT's"),
)
# Projections that some models merge, and their parts in other models.
_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Modules that transformers 5 renamed, and their names in checkpoints; heads that have another name in some models.
_RENAMED = (
    *((".mlp.", ".block_sparse_moe."), ("embed_out", LM_HEAD), ("backbone.", "model."), (".forget_gate.", ".")),
)
_MORE_TENSORS, _MORE_ELEMENTS = 2048, 1 << 21
"""Tensors and numbers beyond those of the largest adapter; see `file_limits`."""
_MAX_KEY = 1000
"""Characters of the longest key that is read."""
_MAX_CACHED = 200
"""Characters of a key that is cached."""


class ModuleShape(NamedTuple):
    """Shape of a module of the base model, and access to its weight for checks."""

    in_features: int
    """The vocabulary for an embedding."""
    out_features: int
    embedding: bool = False
    """True for a table that is looked up; its adapters have lora_embedding_A and _B instead of lora_A and lora_B."""
    is_base: Callable[[Tensor], bool] | None = None
    """Returns True for a tensor equal to the module's own weight, of which PEFT writes copies; None: copies are
    refused."""
    base: BaseWeight | None = None
    """The weights that DoRA's gains and trained biases refer to; None: both are refused."""
    tied: bool = False
    """True for a head whose weight is that of the embeddings."""

    @property
    def vocabulary(self) -> tuple[int, int]:
        """Vocabulary and hidden size of an embedding or a head."""
        sizes = self.in_features, self.out_features
        return sizes if self.embedding else sizes[::-1]


class ModelModules(NamedTuple):
    """A model that adapters change."""

    shapes: dict[str, ModuleShape]
    """Modules that adapters may target, by the checkpoint's names."""
    layout: ModelLayout
    """Layout of their rank rows."""


def file_limits(known: Mapping[str, ModuleShape], max_rank: int) -> FileLimits:
    """Return the size of the largest file that is read for a model with `known` modules.

    A number may take 8 bytes, and the file may have magnitudes and copies of the base's weights. The limit has some
    slack, so that an adapter of another model is refused with its keys in the message, not with its size.
    """
    num_tensors, num_elements = _MORE_TENSORS, _MORE_ELEMENTS
    for shape in known.values():
        num_tensors += 6
        num_elements += max_rank * (shape.in_features + shape.out_features) + 3 * shape.out_features
        if shape.is_base is not None:
            num_elements += shape.in_features * shape.out_features
    return FileLimits(num_tensors, 8 * num_elements)


class Owner(NamedTuple):
    """Name of the model that weights are for, in messages."""

    kind: str
    words: str


BASE, DRAFTER = Owner("base", "the served model"), Owner("drafter", "the drafter")


@dataclass(slots=True)
class FileModule:
    """Keys of one module in a file, or of several modules merged into one projection in the file."""

    name: str
    """Name in the model; "…qkv_proj" for a merged projection."""
    configured: str
    """Name in the file, which the patterns of adapter_config.json match."""
    targets: tuple[str, ...]
    """Modules of the model: one, or the consecutive ones in lora_B of the merged projection."""
    shape: ModuleShape
    keys: dict[str, str] = field(default_factory=dict)
    """Key of each part: A, B, MAGNITUDE, LORA_BIAS, BIAS. A module that has no adapter may have BIAS alone."""


def group_keys(
    shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, ModuleShape], owner: Owner
) -> tuple[dict[str, FileModule], dict[str, str]]:
    """Group a file's keys by the modules of a model with `known` modules, called `owner` in messages.

    Returns:
        The file's modules, and by key the embedding or head whose weight or rows the file has.

    Raises:
        AdapterError: a key of something that is not served, two keys for one weight, a weight that is missing.
    """
    modules: dict[str, FileModule] = {}
    saved: dict[str, str] = {}
    found: dict[str, FileModule | None] = {}  # each module has several keys
    unplaced: list[AdapterError] = []
    for key in sorted(shapes):
        if len(key) > _MAX_KEY:
            raise adapter_error(f"a tensor's key has {len(key)} characters; at most {_MAX_KEY} are read")
        match = _matched(key)
        if match is None and _TRAINING_STATE.search(key):
            continue
        if match is None:
            name = _saved_module(key, known)
            if isinstance(name, AdapterError):
                unplaced.append(name)
            else:
                saved[key] = name
            continue
        if match["module"] not in found:
            found[match["module"]] = find_module(match["module"], known)
            yield_to_steps()
        module = found[match["module"]]
        if module is None or module.name == SCORE:
            unplaced.append(_unknown_module(key, match["module"], owner))
            continue
        if match["magnitude"] is None and module.shape.embedding != bool(match["embedding"]):
            expected = "lora_embedding_A and lora_embedding_B" if module.shape.embedding else "lora_A and lora_B"
            raise adapter_error(f"{module.name}: an adapter here has {expected}, not {key}")
        module = modules.setdefault(module.name, module)
        part = _part(match)
        if part in module.keys:
            raise adapter_error(f"two tensors for the same weight: {module.keys[part]} and {key}")
        module.keys[part] = key
    if unplaced:
        raise summarize_errors(unplaced, "tensors of the file have no place")
    if not any(A in module.keys and 0 not in shapes[module.keys[A]] for module in modules.values()):
        raise adapter_error("the adapter holds no LoRA weights")
    _check_parts(modules)
    return modules, saved


def _check_parts(modules: Mapping[str, FileModule]) -> None:
    owners: dict[str, str] = {}
    for name, module in modules.items():
        for part in (A, B):
            if part not in module.keys and set(module.keys) != {BIAS}:
                raise adapter_error(f"{name}: {part} is missing")
        for target in module.targets:
            if target in owners:
                raise adapter_error(f"two adapters for {target}: {owners[target]} and {name}")
            owners[target] = name


def _part(match: re.Match[str]) -> str:
    """Return the part of a module's weights that a key means."""
    if match["lora_bias"]:
        return LORA_BIAS
    return match["magnitude"] or match["linear"] or match["bias"] or f"lora_{match['embedding']}"


def _cached(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Cache a function of a key: most adapters have the same keys. Long keys, which no model has, are not cached."""
    cached = functools.lru_cache(4096)(parse)
    return lambda key: cached(key) if len(key) <= _MAX_CACHED else parse(key)


@_cached
def _matched(key: str) -> re.Match[str] | None:
    return _KEY.match(key)


@_cached
def unwrapped(module: str) -> str:
    """Strip the names of wrappers around the model in training."""
    module = _TRAINING_WRAPPERS.sub("", module)
    for wrapper in _WRAPPERS:
        if module.startswith(wrapper):
            return module[len(wrapper) :]
    return module


def possible_names(configured: str) -> Iterator[str]:
    """Possible names in the model of a module of a file."""
    text = _TEXT_MODEL.sub(r"\1", configured, count=1)
    for name in dict.fromkeys(f"{prefix}{given}" for given in (configured, text) for prefix in _INNER):
        yield name
        for new, old in _RENAMED:
            if new in name:
                yield name.replace(new, old, 1)


def find_module(module: str, known: Mapping[str, ModuleShape]) -> FileModule | None:
    """Find the model's module of a key. PEFT may have wrapped the inner model, or one around it."""
    configured = unwrapped(module)
    for name in possible_names(configured):
        if name in known:
            return FileModule(name, configured, (name,), known[name])
        parent, _, last = name.rpartition(".")
        targets = tuple(f"{parent}.{part}" for part in _MERGED.get(last, ()))
        if targets and all(target in known for target in targets):
            out_features = sum(known[target].out_features for target in targets)
            return FileModule(name, configured, targets, ModuleShape(known[targets[0]].in_features, out_features))
    return None


def _saved_module(key: str, known: Mapping[str, ModuleShape]) -> str | AdapterError:
    """Return the embedding or head of a key that is no LoRA weight, or why there is none."""
    match = _SAVED.match(key)
    module = find_module(match["module"], known) if match else None
    if module is not None and module.shape.is_base is not None:
        return module.name
    return _refused(key, key) or adapter_error(
        f"tensor {key} is no LoRA weight of a linear module; only those are served"
    )


def _unknown_module(key: str, module: str, owner: Owner) -> AdapterError:
    return _refused(key, key if key.endswith(".bias") else f"{module}.") or adapter_error(
        f"{owner.kind} mismatch: {owner.words} has no linear module {unwrapped(module)!r} (tensor {key})"
    )


def _refused(key: str, text: str) -> AdapterError | None:
    for pattern, message in _REFUSED_KEYS:
        if pattern.search(text):
            return adapter_error(f"{message} ({key})")
    return None


def summarize_errors(errors: Sequence[AdapterError], what: str) -> AdapterError:
    """Return the error for several tensors or modules: the first one's, and the number of the others."""
    more = f", and {len(errors) - 1} more {what}" if len(errors) > 1 else ""
    return adapter_error(f"{errors[0].message}{more}")
