"""Draft weights of the base model, for a target that drafts for itself: rank rows at the target's own sites.

rank row    0 ... n - 1                                      n ...
owner       adapters, each with rows of its draft weights    draft weights of the base model
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..platform.core.adapter_files import AdapterFolder
from ..platform.core.errors import AdapterError, InvalidRequestError
from .device.batching import DeviceWeights, StepAdapters
from .device.layout import PackedModules, latents_of
from .device.pool import Allocation, RowPool
from .device.sites import AdapterSites, TargetDraftSites
from .files.peft_weights import WeightsReader
from .files.tensor_keys import DRAFTER

if TYPE_CHECKING:
    from ..models.batch import AdapterPreparer
    from ..models.layers.linear import Linear

_PARAM = "speculative_config"
_MAX_RANK = 1024
"""Largest rank of the base model's draft weights. Published ones have 128."""
_KEY = b"draft weights of the base model"


def read_target_draft(folder: Path, sites: TargetDraftSites) -> PackedModules:
    """Read the PEFT folder of the base model's draft weights.

    Raises:
        InvalidRequestError: it does not fit the target, or has something that is not served for drafts.
    """
    try:
        packed, _ = WeightsReader(sites.model, _MAX_RANK, DRAFTER).read(AdapterFolder(str(folder)))
    except AdapterError as error:
        raise InvalidRequestError(f"{_PARAM}: {error.message}", param=_PARAM) from error
    if packed.invocation or not packed.rank:
        problem = "alora_invocation_tokens" if packed.invocation else "no LoRA"
        raise InvalidRequestError(f"{_PARAM}: draft weights with {problem} are not served", param=_PARAM)
    return packed


def write_target_draft(sites: AdapterSites, packed: PackedModules, first_row: int) -> DeviceWeights:
    """Write the base model's draft weights to the rows from `first_row` on, which are allocated."""
    allocation = Allocation(_KEY, tuple(range(first_row, first_row + packed.rank)))
    sites.write(allocation, packed)
    names = [name for name in packed.vocabulary.layout.modules if packed.vocabulary.has(name)]
    return DeviceWeights(
        allocation, packed.is_plain and not latents_of(packed), any(".experts." in name for name in names)
    )


def prepare_without_adapters(
    linears: Sequence[Linear], folder: Path, dtype: torch.dtype, device: torch.device
) -> AdapterPreparer:
    """Give the linears of an engine without adapters their sites; returns `StepAdapters.prepare_target_draft`.

    Raises:
        InvalidRequestError: as in `read_target_draft`.
    """
    sites = AdapterSites(linears, None, dtype, device)
    packed = read_target_draft(folder, TargetDraftSites(sites))
    sites.allocate(packed.rank)
    weights = write_target_draft(sites, packed, 0)
    return StepAdapters(RowPool(0, 1), dtype, device, packed.rank, target_draft=weights).prepare_target_draft
