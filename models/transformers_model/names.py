"""Names of a checkpoint's tensors, and those that transformers renames or merges when it loads them.

Most names are those of the modules. For others transformers' own conversions are asked: for a model type it renames
tensors (embed_out to lm_head of GPT-NeoX), or merges several (the experts of a layer).
"""

from __future__ import annotations

import copy
import functools
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ..checkpoint.weight_files import StoredTensor
from ..layers.weights import WeightSlot

_COMPUTED = r"rotary_emb\.inv_freq$"


class CheckpointNames:
    """Names of one model's checkpoints."""

    def __init__(self, model: Any) -> None:
        """Read the conversions of a model of transformers whose modules are still its own."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._model = model
        self._prefix = model.base_model_prefix
        self._ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), _COMPUTED]
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    def by_slot(
        self, tensors: Mapping[str, StoredTensor], slots: Mapping[str, WeightSlot], tied: Collection[str]
    ) -> dict[str, StoredTensor]:
        """Stored tensors by the names of slots; those of no slot keep their names. `tied` have no slot either, and are
        left out, as are buffers that follow from the config."""
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        known = {**slots, **dict.fromkeys(tied, True)}
        found: dict[str, StoredTensor] = {}
        merged: dict[str, list[tuple[str, str, StoredTensor]]] = defaultdict(list)
        for name in sorted(tensors, key=dot_natural_key):
            slot, pattern = name, None
            if name not in known:
                slot, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, known)
            if pattern is not None:
                merged[slot].append((pattern, name, tensors[name]))
            elif slot in slots:
                found[slot] = tensors[name]
            elif slot not in tied and not any(re.search(key, name) for key in self._ignored):
                found[name] = tensors[name]
        for slot, parts in merged.items():
            found |= self._converted(slot, parts, slots)
        return found

    def _converted(
        self, first: str, parts: list[tuple[str, str, StoredTensor]], slots: Mapping[str, WeightSlot]
    ) -> dict[str, StoredTensor]:
        """Results of one conversion, which is done when the first of them is read."""
        converter = next(entry for entry in self._converters if parts[0][0] in entry.source_patterns)

        @functools.cache
        def convert() -> dict[str, Tensor]:
            mapping = copy.deepcopy(converter)
            for pattern, name, stored in parts:
                mapping.add_tensor(first, name, pattern, stored.dense)  # type: ignore[arg-type]  # it takes callables too
            results: dict[str, Tensor] = mapping.convert(first, model=self._model, config=self._model.config)
            return results

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            result = convert()[name]
            if tuple(result.shape) != shape:
                raise RuntimeError(f"its parts make {list(result.shape)}, not {list(shape)}")
            return result[0] if isinstance(result, list) else result

        targets = converter.target_patterns
        names = [first.replace(targets[0], target) for target in targets]
        shapes = {name: slots[name].shape for name in names if name in slots}
        return {name: StoredTensor(shape, functools.partial(read, name, shape)) for name, shape in shapes.items()}
