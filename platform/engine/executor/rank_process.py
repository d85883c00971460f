"""A rank other than the first: `python -m outrider.platform.engine.executor.rank_process DESCRIPTOR`.

The descriptor is a socket to rank 0. This process executes rank 0's messages in order, and exits when the socket
closes. It exits on an error too: rank 0 sees that, and shuts the engine down.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ....kernels.graphs import CudaGraphs
from ....kernels.memory import release_pages
from ....kernels.threads import use_pool
from ....lora.device.batching import StepAdapters
from ....lora.device.layout import ModelLayout
from ....lora.device.pool import Allocation, RowPool
from ....lora.device.sites import AdapterSites
from ....models.batch import AdapterPreparer, LayerKV, allocate_kv
from ....models.checkpoint.loader import ModelOptions, load_model
from ....models.checkpoint.weight_update import WeightUpdate
from ....models.model import LanguageModel
from ....models.pass_graphs import PassGraphs
from ....models.pass_grid import PassLimits
from ....models.states.memory import LayerStates, allocate_states, release_states
from ....spec_decode.drafters.base import no_adapters
from ...core.batch import Move
from ...core.errors import OutriderError
from ...core.wire import receive, send
from ..description import weight_bytes
from ..memory.host_store import HostStore
from .base import LocalExecutor
from .captured import AgreedGraphs, TargetPasses
from .collectives import ProcessRanks, open_store
from .launch import LOAD_TIMEOUT
from .messages import Message, RankSpec, decode_packed, decode_rows, receive_message

logger = logging.getLogger(__name__)


class AdapterHandle(NamedTuple):
    """Adapter as rank 0 names it in a pass; represents an `AdapterVersion` of rank 0."""

    digest: bytes
    targets_head: bool
    targets_experts: bool
    is_plain: bool = True
    has_draft: bool = False


class AdapterRows:
    """Rows of adapters, as allocated by rank 0. It replaces a `RowPool`, whose decisions are rank 0's."""

    def __init__(self, sites: AdapterSites, num_rows: int, max_rank: int, device: torch.device) -> None:
        sites.allocate(num_rows)
        self.num_rows = num_rows
        self._sites = sites
        self._allocations: dict[bytes, Allocation] = {}
        self.steps = StepAdapters(cast(RowPool, self), sites.model.layout.dtype, device, max_rank)

    @property
    def layout(self) -> ModelLayout:
        """Layout of an adapter in the whole model."""
        return self._sites.model.layout

    def allocation(self, key: bytes) -> Allocation:
        """Rows of an adapter."""
        return self._allocations[key]

    def write(self, message: Message) -> None:
        """Write an adapter's share to its rows."""
        digest, rows, facts = message.arguments
        allocation = Allocation(bytes.fromhex(digest), tuple(rows))
        self._allocations[allocation.key] = allocation
        self._sites.write(allocation, decode_packed(facts, message.arrays, self.layout))

    def free(self, key: bytes, rows: list[int]) -> None:
        """Drop an adapter and its weights outside these rows, unless it has other rows by now."""
        allocation = self._allocations.get(key)
        if allocation is not None and allocation.rows == tuple(rows):
            del self._allocations[key]


class Rank:
    """Executes the messages of rank 0."""

    def __init__(self, model: LanguageModel, ranks: ProcessRanks, path: Path, options: ModelOptions) -> None:
        """Execute messages for a rank's share of the checkpoint at `path`, which was loaded with `options`."""
        self._model = model
        self._ranks = ranks
        self._path, self._options = path, options
        self._kv: list[LayerKV] = []
        self._states: list[LayerStates] = []
        self._host: HostStore | None = None
        self._adapters: AdapterRows | None = None
        self._executor: LocalExecutor | None = None
        self._graphs: PassGraphs | None = None

    def handle(self, message: Message) -> None:
        """Execute one message."""
        verb, arguments = message.verb, message.arguments
        if verb == "forward":
            lengths, handles, aux_layers = arguments
            rows = decode_rows(lengths, message.arrays[0])
            self._local.forward(rows, _handles(handles), aux_layers)
        elif verb == "replay":
            lengths, handles, verifies = arguments
            rows = decode_rows(lengths, message.arrays[0])
            found = self._local.replay(rows, _handles(handles), verifies=verifies)
            if found is None:
                raise RuntimeError("this rank has no graph of a pass that rank 0 replays; enforce_eager captures none")
        elif verb == "capture":
            assert self._graphs is not None
            self._graphs.capture_ahead()
        elif verb == "logits":
            count, handles = arguments
            config = self._model.config
            hidden = torch.empty(count, config.embedding_size, dtype=config.dtype, device=self._model.device)
            self._local.logits(self._ranks.copy_first(hidden), _handles(handles))
        elif verb == "lookup":
            ids = torch.empty(arguments[0], dtype=torch.int64, device=self._model.device)
            self._model.embedding.lookup(self._ranks.copy_first(ids))
        elif verb == "write":
            assert self._adapters is not None
            self._adapters.write(message)
        elif verb == "free":
            assert self._adapters is not None
            self._adapters.free(bytes.fromhex(arguments[0]), arguments[1])
        elif verb == "move":
            assert self._host is not None
            self._host.run([Move(*move) for move in arguments])
        elif verb == "allocate":
            self._allocate(*arguments)
        elif verb == "update":
            self._update([Path(path) for path in arguments])
        else:
            assert verb == "release", verb
            for part in (part for layer in self._kv for part in layer):
                release_pages(part)
            release_states(self._states)
            if self._host is not None:
                self._host.release_memory()

    def _update(self, sources: list[Path]) -> None:
        """Replace this rank's share of the weights, if all ranks accept the new ones; see `ParallelExecutor`. Refused
        weights are logged."""
        found = None
        try:
            found = WeightUpdate(self._model, self._path, sources, self._options)
        except Exception as error:
            logger.warning("rank %d refuses new weights: %s", self._ranks.rank, error)
        if self._ranks.agree(found is not None, LOAD_TIMEOUT):
            assert found is not None
            found.apply()
            self._ranks.agree(True, LOAD_TIMEOUT)  # rank 0 answers when all have replaced theirs

    @property
    def _local(self) -> LocalExecutor:
        assert self._executor is not None, "`allocate` comes first"
        return self._executor

    def _allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: str,
        num_states: int,
        lora: list[int] | None,
        host: int,
        graphs: list[Any] | None,
    ) -> None:
        model, dtype, device = self._model, self._model.config.dtype, self._model.device
        logits = None
        if graphs is not None:
            aux_layers, *limits = graphs
            backend = AgreedGraphs(CudaGraphs(device), self._ranks.agree)
            self._graphs = PassGraphs(backend, PassLimits(*limits))
            # As rank 0 does, whose cache is as large.
            logits = self._graphs.token_logits(model.config.vocab_size, device)
        self._kv = allocate_kv(model.kv_layers, num_blocks, block_size, dtype, device, kv_cache_dtype)
        self._states = allocate_states(model.state_layers, num_states, dtype, device)
        self._host = HostStore(self._kv, host) if host else None
        prepare: AdapterPreparer = no_adapters
        prepare_head: AdapterPreparer = no_adapters
        if lora is not None:
            num_rows, max_rank = lora
            sites = AdapterSites(model.linears(), model.embedding, dtype, device)
            self._adapters = AdapterRows(sites, num_rows, max_rank, device)
            prepare, prepare_head = self._adapters.steps.prepare, self._adapters.steps.prepare_head
        passes, preparers = None, (prepare, prepare_head)
        if self._graphs is not None:
            passes = TargetPasses(self._graphs, model, self._kv, preparers, aux_layers, logits)
        self._executor = LocalExecutor(model, self._kv, preparers, passes, self._states)


def _handles(handles: list[list[Any]]) -> list[tuple[AdapterHandle | None, int]]:
    return [
        (None if digest is None else AdapterHandle(bytes.fromhex(digest), head, experts), count)
        for digest, head, experts, count in handles
    ]


@torch.inference_mode()
def run(link: socket.socket) -> None:
    """Load this rank's share and work until rank 0 is gone."""
    spec = RankSpec(*receive(link)[0])
    logging.basicConfig(level=spec.log_level)
    try:
        if spec.device == "cuda":
            torch.cuda.set_device(spec.device_index)
        else:
            torch.set_num_threads(spec.num_threads)
        store = open_store(spec.store, spec.size)
        ranks = ProcessRanks(store, spec.rank, spec.size, spec.device, spec.address, lambda: send(link, {}))
        send(link, {})
        options = ModelOptions("native", spec.quantization, ranks)
        model = load_model(spec.path, spec.dtype, spec.device, spec.load_format, seed=spec.seed, options=options)
    except Exception as error:
        info = error.info() if isinstance(error, OutriderError) else None
        send(link, {"error": [info.type, info.message, info.param] if info else ["", repr(error), None]})
        return
    if spec.device == "cpu":
        use_pool(all(linear.is_elsewhere or linear.packed.fuses_adapters for linear in model.linears()))
    rank = Rank(model, ranks, Path(spec.path), options)
    send(link, {"weight_bytes": weight_bytes(model, model.config.dtype)})
    while True:
        rank.handle(receive_message(link))


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 0
    try:
        with contextlib.suppress(EOFError, ConnectionError):  # rank 0 is gone
            run(socket.socket(fileno=int(sys.argv[1])))
    except BaseException:
        logger.exception("a rank failed")
        status = 1
    sys.stderr.flush()
    os._exit(status)  # libraries may leave threads that never end


if __name__ == "__main__":
    main()
