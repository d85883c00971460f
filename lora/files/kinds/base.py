"""One adapter kind: the rules of its configuration's fields, and its files seen as those of LoRA."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ....platform.core.adapter_files import CONFIG_FILE
from ..errors import adapter_error
from ..tensor_file import FLOATS, TensorFile
from ..tensor_keys import ModuleShape

ANY = "any value"
TRAINING = "any value; it concerns training"


class FieldRule(NamedTuple):
    """One field of adapter_config.json."""

    served: str
    """Values that are served, for the documentation."""
    refused: str = ""
    """Values that are refused, for the documentation and the error; "" when there are none."""
    is_refused: Callable[[Any], bool] = bool
    """Returns True for a value that is refused. An absent field and a neutral value are accepted."""
    refused_on: str = ""
    """Modules on which the field is refused when they are read, for the documentation."""

    @property
    def refusals(self) -> str:
        """All that is refused, for the documentation."""
        return "; ".join(part for part in (self.refused, self.refused_on and f"on {self.refused_on}") if part)

    def refuses(self, value: Any) -> bool:
        """Return whether a value of adapter_config.json is refused."""
        return bool(self.refused) and self.is_refused(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKind:
    """Adapters of one `peft_type`, whose delta is a product of low rank."""

    peft_type: str
    own_fields: Mapping[str, FieldRule]
    """Fields that LoRA lacks, or that mean something else here."""
    shared_fields: Collection[str]
    """LoRA's fields that mean the same here."""
    as_lora: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns LoRA's fields computed from this kind's own. The configuration follows the rules of `own_fields`."""
    tensors: Callable[[TensorFile, Mapping[str, ModuleShape]], TensorFile]
    """Views a file's tensors under LoRA's names, for a model with these modules. It checks shapes, and nothing is read
    until the view's `read`."""
    prunes_ranks: bool = False
    """True when modules may have rank 0: their tensors have no rows, and no effect."""


def positive(name: str, value: Any, *, integer: bool) -> Any:
    """Return the value of a field, or refuse (AdapterError) anything but a positive number below 2^31."""
    good = isinstance(value, int) or (not integer and isinstance(value, float) and math.isfinite(value))
    if isinstance(value, bool) or not good or not 0 < value < 2**31:
        kind = "a positive integer" if integer else "a positive number"
        raise adapter_error(f"{CONFIG_FILE}: {name} must be {kind} below 2^31, got {str(value)[:40]}")
    return value


def read_floats(file: TensorFile, key: str) -> Tensor:
    """Read a tensor as float32, so that products are rounded once, to the dtype of use."""
    tensor = file.read(key)
    if tensor.dtype not in FLOATS:
        raise adapter_error(f"{key[:200]} has dtype {tensor.dtype}, which is not served")
    return tensor.float()
