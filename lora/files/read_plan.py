"""Read plans: adapters of one recipe have the same header, byte for byte, and the same configuration except for scales.

For such a form keys, shapes and positions are determined once. Then a file goes to its rows in a few native calls,
through the processor's cache. Reading every tensor separately takes three times as long, and evicts the caches of other
threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ...kernels.conversion import StoredGroups, StoredMatrix, serves_stored
from ...kernels.native import DTYPES as CONVERTED
from ..device.layout import ModelLayout, PackedModules
from ..step_yield import yield_to_steps
from .row_conversion import StoredModule, group_modules, start_digest, update_digest
from .tensor_file import DTYPES, Header, TensorFile
from .tensor_keys import A, B

_MAX_PLANS = 16
"""Plans that are kept."""


class _NoPlanError(Exception):
    """No plan is possible; the message has the reason."""


class ReadPlan:
    """Positions of all matrices in the files of one form, and in the rows. Immutable."""

    def __init__(
        self, modules: Sequence[StoredModule], header: Header, layout: ModelLayout, left_out: tuple[str, ...]
    ) -> None:
        """Plan; `left_out`: see `PackedModules`.

        Raises:
            _NoPlanError: no plan is possible. A module has magnitudes, a dtype or an order that plans do not support,
            or is a vocabulary module; or there are no native kernels.
        """
        dtype = layout.dtype
        if not serves_stored(dtype) or not all(module.name in layout.linears.modules for module in modules):
            raise _NoPlanError("no native kernels, or vocabulary modules")
        self.configured = [module.module.configured for module in modules]
        """Name of each module in the configuration."""
        self._shape = layout.linears.packed_shape({module.name: module.rank for module in modules})
        self._vocabulary = layout.vocabulary.pack({})
        self._digest = start_digest(modules, dtype)
        self._left_out = left_out
        columns = {(matrix.name, matrix.which): matrix.column for matrix in self._shape.matrices}
        self._starts: list[int] = []  # first byte of each group in the file's data
        groups: list[list[StoredMatrix]] = []
        for group in group_modules(modules):
            matrices = [matrix for module in group for matrix in _matrices(module, header, columns)]
            first = min(matrix.offset for matrix in matrices)
            num_bytes = max(matrix.offset + matrix.num_bytes for matrix in matrices) - first
            if num_bytes > 2 * sum(matrix.num_bytes for matrix in matrices):
                raise _NoPlanError("neighbours lie far apart")
            self._starts.append(first)
            groups.append([matrix._replace(offset=matrix.offset - first) for matrix in matrices])
        self._stored = StoredGroups(groups, dtype, self._shape.shape)

    def read(self, file: TensorFile, scales: Sequence[float]) -> tuple[PackedModules, bytes] | None:
        """Read a file with these scales; see `convert_modules`. None: its weights are not finite."""
        assert file.fill is not None
        packed = self._shape.empty()
        digest = self._digest.copy()
        conversion = self._stored.start([scale for given in scales for scale in (1.0, given)], packed.data)
        for group, start in enumerate(self._starts):
            file.fill(conversion.buffer(group), start)
            if not conversion.convert(group):
                return None
            update_digest(digest, conversion.result(group))
            yield_to_steps()
            conversion.place(group)
        return PackedModules(packed, self._vocabulary, left_out=self._left_out), digest.digest()


def _matrices(stored: StoredModule, header: Header, columns: dict[tuple[str, int], int]) -> Iterator[StoredMatrix]:
    """A and B of a module in the file's data; _NoPlanError if plans do not support them."""
    keys = stored.module.keys
    if len(keys) > 2:
        raise _NoPlanError("magnitudes")
    a, b = (header.entries[keys[part]] for part in (A, B))
    dtypes = [DTYPES.get(entry.dtype) for entry in (a, b)]
    if dtypes[0] not in CONVERTED or dtypes[1] not in CONVERTED:
        raise _NoPlanError("dtypes that are not converted")
    start = b.start + stored.start * stored.rank * dtypes[1].itemsize
    if a.start % dtypes[0].itemsize or start % dtypes[1].itemsize:
        raise _NoPlanError("matrices are not aligned")
    name, rank = stored.name, stored.rank
    yield StoredMatrix(a.start, rank, stored.in_features, dtypes[0], False, columns[name, 0])
    yield StoredMatrix(start, stored.out_features, rank, dtypes[1], True, columns[name, 1])


class ReadPlans:
    """Read plans for one model, the most recently used. Thread-safe."""

    def __init__(self, layout: ModelLayout) -> None:
        """Keep plans that read into this layout."""
        self._layout = layout
        self._lock = threading.Lock()  # guards the fields below
        self._plans: OrderedDict[tuple[Any, ...], ReadPlan] = OrderedDict()

    def find(self, header: Header | None, form: tuple[Any, ...]) -> ReadPlan | None:
        """Return the plan for files with this header and form (`PeftConfig.form`)."""
        with self._lock:
            plan = self._plans.get((header, form))
            if plan is not None:
                self._plans.move_to_end((header, form))
            return plan

    def make(
        self, modules: Sequence[StoredModule], header: Header, form: tuple[Any, ...], left_out: tuple[str, ...]
    ) -> ReadPlan | None:
        """Make and keep a plan for files like one whose modules were checked; None: no plan is possible."""
        try:
            plan = ReadPlan(modules, header, self._layout, left_out)
        except _NoPlanError:
            return None
        with self._lock:
            self._plans[header, form] = plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plan
