"""Reading of one PEFT folder: keys and shapes checked against a model's modules, then the tensors.

The tensors' keys and shapes determine the adapted modules, adapter_config.json their scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from torch import Tensor

from ...platform.core.adapter_files import AdapterFolder
from ...platform.core.errors import AdapterError
from ..device.layout import PackedModules, latents_of
from .biases import check_biases, read_biases
from .errors import adapter_error
from .expert_parameters import split_parameters
from .foreign_adapters import peft_tensors
from .kinds.lora import LORA
from .peft_config import PeftConfig, read_config
from .read_plan import ReadPlans
from .row_conversion import StoredModule, convert_modules
from .tensor_file import FLOATS, TensorFile, open_tensors
from .tensor_keys import (
    BIAS,
    LORA_BIAS,
    MAGNITUDE,
    A,
    B,
    FileModule,
    ModelModules,
    ModuleShape,
    Owner,
    file_limits,
    group_keys,
    summarize_errors,
)
from .towers import without_towers
from .vocabulary import VocabularyReader, resize, saved_keys


class WeightsReader:
    """Reads the folders of adapters for one model. Thread-safe."""

    def __init__(self, model: ModelModules, max_rank: int, owner: Owner) -> None:
        """`owner`: the model in messages."""
        self.model = model
        self._max_rank = max_rank
        self._owner = owner
        self._plans = ReadPlans(model.layout)
        self.limits = file_limits(model.shapes, max_rank)
        """Size of the largest weights file."""

    def read(self, folder: AdapterFolder) -> tuple[PackedModules, bytes]:
        """Read adapter_config.json and adapter_model.safetensors (or .bin); see `convert_modules`.

        Raises:
            AdapterError: files missing or broken, something that is not served, a rank above `max_rank`, a module that
                the model does not have or that has another shape there, weights that are not finite.
        """
        config = read_config(folder)
        with open_tensors(folder, self.limits) as file:
            plan = None if config.mlx or config.kind is not LORA else self._plans.find(file.header, config.form)
            planned = plan and plan.read(file, [config.scale_of(name) for name in plan.configured])
            packed, digest = planned or self._read_unplanned(file, config)
        if config.invocation:
            _check_activated(packed, config)
            digest = hashlib.sha256(digest + f"invocation {config.invocation}".encode()).digest()
        return packed._replace(invocation=config.invocation), digest

    def _read_unplanned(self, file: TensorFile, config: PeftConfig) -> tuple[PackedModules, bytes]:
        """Check all keys and shapes of a file, plan to read it and more files like it, and read it."""
        known = self.model.shapes
        file, left_out = without_towers(peft_tensors(file) if config.mlx else file)
        file, parameters = split_parameters(file, known, config.version)
        file = config.kind.tensors(file, known)
        found, saved = group_keys(file.shapes, known, self._owner)
        for name, parameter in parameters.items():
            found[name].configured = parameter
        groups = saved_keys(saved, file)
        resize(found, groups, file)
        misfits = [error for module in found.values() if (error := self._misfit(module, config, file.shapes))]
        if misfits:
            raise summarize_errors(misfits, "modules do not fit")
        found = _without_rank_zero(found, config)
        own_rows, own_digest = VocabularyReader(file, config, self.model).read(groups, found)
        modules = [
            stored
            for _, module in sorted(found.items())
            if A in module.keys
            for stored in _split(module, config.scale_of(module.configured), file.shapes, known)
        ]
        biased = [module for _, module in sorted(found.items()) if module.keys.keys() & {BIAS, LORA_BIAS}]
        if file.header is not None and not (biased or saved):
            plan = self._plans.make(modules, file.header, config.form, left_out)
            planned = plan and plan.read(file, [module.scale for module in modules])
            if planned:
                return planned
        packed, digest = convert_modules(modules, lambda module: _read_tensors(module, file), self.model)
        if biased:
            biases, further = read_biases(biased, file, config, self.model)
            packed, digest = packed._replace(biases=biases), hashlib.sha256(digest + further).digest()
        if own_rows:
            packed, digest = packed._replace(own_rows=own_rows), hashlib.sha256(digest + own_digest).digest()
        return packed._replace(left_out=left_out), digest

    def _misfit(
        self, module: FileModule, config: PeftConfig, shapes: Mapping[str, tuple[int, ...]]
    ) -> AdapterError | None:
        try:
            self._check_module(module, config, shapes)
        except AdapterError as error:
            return error
        return None

    def _check_module(self, module: FileModule, config: PeftConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a rank above the limit, shapes that do not fit, and unexpected or missing magnitudes."""
        name, shape, rank = module.name, module.shape, config.rank_of(module.configured)
        if rank > self._max_rank:
            raise adapter_error(f"{name}: rank {rank} exceeds the limit max_lora_rank={self._max_rank}")
        check_biases(module, config)
        if A in module.keys and config.use_dora != (MAGNITUDE in module.keys):
            verb = "is missing: the configuration has" if config.use_dora else "has no use without"
            raise adapter_error(f"{name}: {MAGNITUDE} {verb} use_dora")
        expected: dict[str, tuple[int, ...]] = dict.fromkeys((MAGNITUDE, LORA_BIAS, BIAS), (shape.out_features,))
        expected |= {A: (rank, shape.in_features), B: (shape.out_features, rank)}
        if any(len(shapes[module.keys[part]]) != 2 for part in (A, B) if part in module.keys):
            a, b = (list(shapes[module.keys[part]]) for part in (A, B))
            raise adapter_error(f"{name}: {A} and {B} must be matrices, got shapes {a} and {b}")
        for part, key in module.keys.items():
            if shapes[key] != expected[part]:
                raise adapter_error(
                    f"{name}: {self._owner.kind} mismatch or wrong shape: {part} is {list(shapes[key])}, expected "
                    f"{list(expected[part])} (rank {rank} by the configuration, {shape.in_features} -> "
                    f"{shape.out_features} in {self._owner.words})"
                )


def _check_activated(packed: PackedModules, config: PeftConfig) -> None:
    """Refuse parts of an activated adapter that would affect tokens before its invocation."""
    if latents := latents_of(packed):
        raise adapter_error(
            f"{latents[0]}: alora_invocation_tokens is not served on products of latents, which queries "
            "use for the base's keys before the invocation too"
        )
    whole = [*packed.own_rows, *(packed.biases if config.bias != "none" else ())]
    if whole:
        raise adapter_error(
            f"{whole[0]}: alora_invocation_tokens is not served with trained biases or whole weights, which PEFT "
            "applies before the invocation too"
        )


def _without_rank_zero(found: Mapping[str, FileModule], config: PeftConfig) -> dict[str, FileModule]:
    """Return a file's modules without the tensors of those of rank 0; a bias of such a module stays."""
    for module in found.values():
        if A in module.keys and config.rank_of(module.configured) == 0:
            del module.keys[A], module.keys[B]
    return {name: module for name, module in found.items() if module.keys}


def _split(
    module: FileModule, scale: float, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, ModuleShape]
) -> Iterator[StoredModule]:
    """Split a module of the file into the model's modules that it stands for."""
    rank, in_features = shapes[module.keys[A]]
    start = 0
    for target in module.targets:
        size = known[target].out_features if len(module.targets) > 1 else module.shape.out_features
        yield StoredModule(target, rank, in_features, size, scale, module, start)
        start += size


def _read_tensors(stored: StoredModule, file: TensorFile) -> dict[str, Tensor]:
    keys = stored.module.keys
    tensors = {part: file.read(keys[part]) for part in (A, B, MAGNITUDE) if part in keys}
    for part, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise adapter_error(f"{stored.module.name}: {part} has dtype {tensor.dtype}, which is not served")
    rows = slice(stored.start, stored.start + stored.out_features)
    return {part: tensor if part == A else tensor[rows] for part, tensor in tensors.items()}
