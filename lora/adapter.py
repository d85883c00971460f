"""The adapter's first form and its third: folders on disk, and packed weights in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..platform.core.adapter_files import AdapterFolder
from ..platform.core.errors import AdapterError
from .device.layout import LM_HEAD, SCORE, PackedModules, latents_of
from .files.errors import adapter_error, quote_path

DRAFT_LOADED = "loaded"
"""`Adapter.draft` when there are draft weights."""


class AdapterSource(NamedTuple):
    """Folders of an adapter's files, or the files that are in memory."""

    path: str
    draft_path: str | None = None
    """Folder of the draft weights, if it was named; None: the folder "draft" of `path`, if it exists and fits."""
    digest: str | None = None
    """Digest of the files as registered by another server (`files_digest`); None: not registered."""
    roots: tuple[str, ...] = ()
    """Real paths of the folders that must contain all files; see `AdapterFolder`."""
    files: tuple[tuple[str, str], ...] = ()
    """Files in memory, which are those of `AdapterFolder`; (): `path` is a folder."""

    @property
    def folder(self) -> AdapterFolder:
        """The adapter's folder, through which its files are opened."""
        return AdapterFolder(self.path, tuple(self.roots), files=tuple(self.files))

    def matches(self, asked: AdapterSource) -> bool:
        """True if a request for `asked` means this source. A request without a draft path means the registered one."""
        return self.path == asked.path and asked.draft_path in (None, self.draft_path)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Checked weights in host memory, packed in rank order, ready to be copied to the device. Immutable."""

    digest: bytes
    """SHA-256 of what it computes: names and tensors of all modules, the drafter's too. The key of every cache."""
    target: PackedModules
    """Weights for the base model."""
    drafter: PackedModules
    """Weights for the engine's drafter; of rank 0 when there are none."""
    draft: str = ""
    """`DRAFT_LOADED`; "" when there are no draft weights or no drafter; else the reason why they are not used."""
    load_seconds: float = 0.0
    """Seconds that reading took."""

    @property
    def packed(self) -> tuple[PackedModules, PackedModules]:
        """Weights for the base model, and for the drafter."""
        return self.target, self.drafter

    @property
    def rows(self) -> int:
        """Rank rows that it takes on the device: the largest rank of its modules, and at least one."""
        shared = self.drafter.rank - self.draft_rows  # rows of two models are numbered alike
        return max(self.target.rank, shared, 1) + self.draft_rows

    @property
    def draft_rows(self) -> int:
        """Number of its rank rows that only draft weights use: their rank if the target drafts for itself, else 0."""
        return self.drafter.rank if self.drafter.linears.layout is self.target.linears.layout else 0

    @property
    def _of_target(self) -> tuple[PackedModules, ...]:
        """Weights of the base model's modules."""
        return self.packed if self.draft_rows else (self.target,)

    @property
    def bytes_outside_rows(self) -> int:
        """Bytes of device memory in addition to its rank rows; see `PackedModules.bytes_outside_rows`."""
        return self.target.bytes_outside_rows + self.drafter.bytes_outside_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self.target.num_bytes + self.drafter.num_bytes

    @property
    def targets_head(self) -> bool:
        """True when it changes the base model's lm_head or score matrix, or has a vocabulary of its own."""
        return self.target.has(LM_HEAD) or self.target.has(SCORE) or self.target.vocab_size > 0

    @property
    def targets_latents(self) -> bool:
        """True when it changes products of latents, which no captured graph has."""
        return any(map(latents_of, self._of_target))

    @property
    def targets_experts(self) -> bool:
        """True when it changes experts of the base model."""
        vocabularies = [packed.vocabulary for packed in self._of_target]
        return any(
            ".experts." in list(rows.layout.modules)[index]
            for rows in vocabularies
            for index in np.flatnonzero(rows.live.any(0))
        )


def changed_error(name: str, reason: str = "") -> AdapterError:
    """The error for an adapter whose files have changed since they were registered."""
    why = f" ({reason})" if reason else ""
    return adapter_error(
        f"the files of adapter {quote_path(name)} have changed since it was loaded{why}; load it "
        "again with load_inplace"
    )
