"""Adapters of one form: what was found out about one is known of those that come after it.

Tenants train with one recipe, so that most adapters have the same header, byte for byte, and the same configuration
but for its scales. Of such a form the keys are understood, the shapes checked and all places computed once; then a file
goes to its rows in a few native calls, through the processor's cache. To take every tensor in hand takes three times as
long, and sweeps the caches of those who compute.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ...kernels.conversion import StoredGroups, StoredMatrix, serves_stored
from ...kernels.native import DTYPES as CONVERTED
from ..device.layout import ModelLayout, PackedModules, PackedWeights
from ..tiers.step_signal import give_way
from .serving_form import DIGESTED_BYTES, StoredModule, digest_start, groups
from .tensor_file import DTYPES, Header, TensorFile
from .tensor_keys import A, B

_KEPT = 16
"""Plans."""


class ReadPlan:
    """How to read the files of one form into rows. Never changed."""

    def __init__(
        self, sources: Sequence[StoredModule], starts: Sequence[int], stored: StoredGroups, layout: ModelLayout
    ) -> None:
        """See `ReadPlans.keep`. `starts`: the first byte of each group in the file's data."""
        self.rank = max(source.rank for source in sources)
        self.configured = [source.module.configured for source in sources]
        """Name of each module in the configuration."""
        self._starts = starts
        self._stored = stored
        self._layout = layout
        self._cut = layout.linears.cut({source.name: source.rank for source in sources})
        self._rest = layout.vocabulary.pack({})
        self._digest = digest_start(sources, layout.linears.dtype)

    def read(self, file: TensorFile, scales: Sequence[float]) -> tuple[PackedWeights, bytes] | None:
        """Result of `serving_form.serve` for a file with these scales, packed, and the digest; None: it is not
        finite."""
        assert file.fill is not None
        packed = self._cut.empty(self._layout.linears.dtype)
        digest = self._digest.copy()
        conversion = self._stored.start([scale for given in scales for scale in (1.0, given)], packed.data)
        for group, start in enumerate(self._starts):
            file.fill(conversion.buffer(group), start)
            if not conversion.convert(group):
                return None
            result = conversion.result(group)
            for first in range(0, len(result), DIGESTED_BYTES):
                give_way()
                digest.update(result[first : first + DIGESTED_BYTES])
            give_way()
            conversion.place(group)
        return PackedWeights(self._layout, PackedModules(packed, self._rest, {})), digest.digest()


def _make_plan(sources: Sequence[StoredModule], header: Header, layout: ModelLayout) -> ReadPlan | None:
    dtype = layout.linears.dtype
    if not serves_stored(dtype) or not all(source.name in layout.linears for source in sources):
        return None
    cut = layout.linears.cut({source.name: source.rank for source in sources})
    targets = {(part.name, part.which): part.column for part in cut.parts}
    starts: list[int] = []
    found: list[list[StoredMatrix]] = []
    for group in groups(sources):
        matrices = [matrix for source in group for matrix in _matrices(source, header, targets)]
        if len(matrices) < 2 * len(group):
            return None
        first = min(matrix.offset for matrix in matrices)
        num_bytes = max(matrix.offset + matrix.num_bytes for matrix in matrices) - first
        if num_bytes > 2 * sum(matrix.num_bytes for matrix in matrices):
            return None
        starts.append(first)
        found.append([matrix._replace(offset=matrix.offset - first) for matrix in matrices])
    return ReadPlan(sources, starts, StoredGroups(found, dtype, cut.shape), layout)


def _matrices(source: StoredModule, header: Header, targets: dict[tuple[str, int], int]) -> Iterator[StoredMatrix]:
    """A and B of a module, where they lie in the file's data; nothing of one that cannot be planned."""
    module = source.module
    if len(module.keys) > 2:  # magnitudes
        return
    a, b = (header.entries[module.keys[part]] for part in (A, B))
    dtypes = [DTYPES.get(entry.dtype) for entry in (a, b)]
    if dtypes[0] not in CONVERTED or dtypes[1] not in CONVERTED:
        return
    start = b.start + source.start * source.rank * dtypes[1].itemsize
    if a.start % dtypes[0].itemsize or start % dtypes[1].itemsize:
        return
    name = source.name
    yield StoredMatrix(a.start, source.rank, source.in_features, dtypes[0], False, targets[name, 0])
    yield StoredMatrix(start, source.out_features, source.rank, dtypes[1], True, targets[name, 1])


class ReadPlans:
    """Read plans of one engine's target, the most recently used. For any thread."""

    def __init__(self, layout: ModelLayout) -> None:
        """For rows of this layout."""
        self._layout = layout
        self._lock = threading.Lock()  # guards what follows
        self._plans: OrderedDict[tuple[Any, ...], ReadPlan] = OrderedDict()

    def find(self, header: Header | None, form: tuple[Any, ...]) -> ReadPlan | None:
        """The plan for files with this header and form (`PeftConfig.form`)."""
        with self._lock:
            plan = self._plans.get((header, form))
            if plan is not None:
                self._plans.move_to_end((header, form))
            return plan

    def keep(self, sources: Sequence[StoredModule], header: Header, form: tuple[Any, ...]) -> None:
        """Plan for more files like one that was found right. Without effect where that cannot be: it has magnitudes, a
        dtype or an order that takes more thought, or vocabulary modules; or there are no native kernels."""
        plan = _make_plan(sources, header, self._layout)
        if plan is not None:
            with self._lock:
                self._plans[header, form] = plan
                while len(self._plans) > _KEPT:
                    self._plans.popitem(last=False)
