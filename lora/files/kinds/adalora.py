"""AdaLoRA (Zhang et al. 2023, arXiv:2303.10512): its tensors, seen as those of LoRA.

    ….q_proj.lora_A     [r, in]     lora_A.weight = diag(E) A
    ….q_proj.lora_E     [r, 1]      singular values
    ….q_proj.lora_B     [out, r]    lora_B.weight = B

The delta is alpha / (init_r + 1e-5) · B (E * (A x)), with this scale for modules of any rank r. Training prunes ranks:
the file has the rows that are left, and rank_pattern a boolean for each of the init_r rows. A module of rank 0 has no
delta. Other tensors keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ....platform.core.adapter_files import CONFIG_FILE
from ....platform.core.sampling_params import quote_for_error
from ...step_yield import yield_to_steps
from ..errors import adapter_error
from ..patterns import check_bounds
from ..tensor_file import TensorFile
from ..tensor_keys import ModuleShape, unwrapped
from .base import TRAINING, AdapterKind, FieldRule, positive, read_floats
from .lora import FIELDS

_IGNORED = FieldRule("any value; PEFT ignores it")
_PATTERN = re.compile(r"\.lora_E(\.[^.]+)?$")
_PART = re.compile(r"^(?P<module>.+)\.lora_(?P<part>[ABE])(?:\.[^.]+)?$")


def _is_no_masks(value: Any) -> bool:
    masks = value or {}
    return not isinstance(masks, dict) or not all(
        isinstance(mask, list) and all(isinstance(row, bool) for row in mask) for mask in masks.values()
    )


_OWN: dict[str, FieldRule] = {
    "init_r": FieldRule("any positive integer; the ranks that are left are up to `--max-lora-rank`"),
    "rank_pattern": FieldRule("lists of booleans: the rows that training kept", "other values", _is_no_masks),
    "r": _IGNORED,
    "alpha_pattern": _IGNORED,
    "use_rslora": _IGNORED,
    "lora_bias": _IGNORED,
    "init_lora_weights": _IGNORED,
    "use_dora": FieldRule("", "DoRA"),
    "target_parameters": FieldRule("", "targeted parameters"),
    "alora_invocation_tokens": FieldRule("", "activated LoRA"),
    **dict.fromkeys(
        ("target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"),
        FieldRule(TRAINING),
    ),
}


def _as_lora(config: dict[str, Any]) -> dict[str, Any]:
    """Return LoRA's fields; alpha_pattern keeps the scale of modules that have lost ranks.

    Raises:
        AdapterError: init_r or lora_alpha is no positive number, or a mask has more or fewer rows than init_r.
    """
    init_r = positive("init_r", config.get("init_r"), integer=True)
    alpha = positive("lora_alpha", config.get("lora_alpha"), integer=False)
    scale = alpha / (init_r + 1e-5)
    masks = config.get("rank_pattern") or {}
    check_bounds("rank_pattern", masks)
    for name, mask in masks.items():
        if len(mask) != init_r:
            where = f"rank_pattern[{quote_for_error(name)}]"
            raise adapter_error(f"{CONFIG_FILE}: {where} must have init_r={init_r} values, got {len(mask)}")
    ranks = {unwrapped(_PATTERN.sub("", name)): sum(mask) for name, mask in masks.items()}
    return {
        "r": init_r,
        "lora_alpha": init_r * scale,
        "rank_pattern": ranks,
        "alpha_pattern": {name: rank * scale for name, rank in ranks.items() if rank > 0},
    }


def _tensors(file: TensorFile, known: Mapping[str, ModuleShape]) -> TensorFile:
    """View an AdaLoRA file's tensors under LoRA's names. Nothing is read yet.

    Raises:
        AdapterError: the file has other tensors of LoRA, two tensors for one weight, or parts of a module that are
            missing or do not fit each other.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    keys: dict[str, dict[str, str]] = {}  # by module and part
    for key, shape in file.shapes.items():
        match = _PART.match(key)
        if match is None and ".lora_" in key:
            raise adapter_error(f"{key[:200]} is not an AdaLoRA tensor; the configuration has peft_type='ADALORA'")
        if match is None:
            shapes[key] = shape
            continue
        parts = keys.setdefault(match["module"], {})
        if match["part"] in parts:
            raise adapter_error(f"two tensors for the same weight: {parts[match['part']][:200]} and {key[:200]}")
        parts[match["part"]] = key
    sources: dict[str, list[str]] = {}  # keys of the factors, by the view's key
    for module, parts in keys.items():
        if missing := sorted({*"ABE"} - parts.keys()):
            raise adapter_error(f"{module[:200]}: lora_{missing[0]} is missing")
        a, b, e = (file.shapes[parts[part]] for part in "ABE")
        if len(a) != 2 or len(b) != 2 or e != (a[0], 1) or b[1] != a[0]:
            raise adapter_error(
                f"{module[:200]}: lora_A, lora_B and lora_E must be [r, in], [out, r] and [r, 1], got {list(a)}, "
                f"{list(b)} and {list(e)}"
            )
        for part, factors in (("A", "AE"), ("B", "B")):
            shapes[f"{module}.lora_{part}.weight"] = file.shapes[parts[part]]
            sources[f"{module}.lora_{part}.weight"] = [parts[factor] for factor in factors]
        yield_to_steps()

    def read(key: str) -> Tensor:
        if key not in sources:
            return file.read(key)
        return reduce(torch.mul, [read_floats(file, source) for source in sources[key]])

    return TensorFile(shapes, read)


ADALORA = AdapterKind(
    peft_type="ADALORA",
    own_fields=_OWN,
    shared_fields=tuple(name for name in FIELDS if name not in _OWN),
    as_lora=_as_lora,
    tensors=_tensors,
    prunes_ranks=True,
)
