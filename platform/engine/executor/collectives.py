"""Sums and copies between ranks, by torch.distributed. Only processes that are ranks import this."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ...core.errors import InvalidRequestError
from .launch import THIS_MACHINE

_TIMEOUT = timedelta(minutes=5)
"""Longest wait of a rank for the others in one operation."""
STORE_TIMEOUT = timedelta(minutes=1)
"""Longest wait for a store that another machine has."""


class ProcessRanks:
    """Implements `models.parallel.Ranks` by a group of its own: a process may have several engines."""

    def __init__(
        self, store: Any, rank: int, size: int, device: str, address: str, begin: Callable[[], None] | None = None
    ) -> None:
        """Join the group; returns when all have joined. gloo on a CPU, NCCL on GPUs.

        Args:
            store: A store of torch.distributed, by which the ranks find each other.
            rank: Number of this process.
            size: Number of processes.
            device: "cpu" or "cuda".
            address: Address at which gloo listens; the variable GLOO_SOCKET_IFNAME names another interface.
            begin: Called before it waits for the others.
        """
        if not dist.is_available():
            raise InvalidRequestError(
                "this build of torch has no torch.distributed, which tensor_parallel_size needs",
                param="tensor_parallel_size",
            )
        from torch.distributed import distributed_c10d

        self.rank, self.size = rank, size
        self._device = device
        options_of: Any = distributed_c10d
        self._sum_options = options_of.AllreduceOptions()
        self._gather_options, self._copy_options = options_of.AllgatherOptions(), options_of.BroadcastOptions()
        for of_operation in (self._sum_options, self._gather_options, self._copy_options):
            of_operation.asyncOp = False
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        gloo: Any = dist.ProcessGroupGloo
        begin = begin or (lambda: None)
        if device == "cuda":
            options = nccl.Options()
            options._timeout = _TIMEOUT
            begin()
            self._group: Any = nccl(store, rank, size, options)
            self.sum(torch.zeros(1, device=device))  # which connects them
            return
        options = gloo._Options()
        options._timeout = _TIMEOUT
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "") if address != THIS_MACHINE else ""
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_device(address)]
        begin()
        self._group = gloo(store, rank, size, options)

    # NCCL's work is in order on the stream that launches it, so a graph captures it and no host waits. gloo's is waited
    # for.

    def sum(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        _finish(self._group.allreduce([x], self._sum_options))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        found = x.new_empty((self.size * len(x), *x.shape[1:]))
        _finish(self._group._allgather_base(found, x.contiguous(), self._gather_options))
        return found.view(self.size, *x.shape)

    def copy_first(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place of every other rank's."""
        _finish(self._group.broadcast([x], self._copy_options))
        return x

    def agree(self, yes: bool, timeout: timedelta = _TIMEOUT) -> bool:
        """True when all ranks say yes; waits for them, on a CPU up to `timeout`."""
        options = type(self._sum_options)()
        options.asyncOp, options.timeout = False, timeout
        votes = torch.tensor([float(yes)], device=self._device)
        _finish(self._group.allreduce([votes], options))
        return int(votes) == self.size

    def abort(self) -> None:
        """End waits of this process's device for a rank that is gone: NCCL's kernels would wait forever, in a replayed
        graph unnoticed by its watchdog. gloo notices by itself. The awaited values are undefined then."""
        if self._device == "cuda":
            self._group.abort()


def _finish(work: Any) -> None:
    if work is not None:  # NCCL has nothing to wait for
        work.wait()


def open_store(place: list[Any], size: int) -> Any:
    """Store at an address: ["file", path], or ["tcp", host, port]."""
    stores: Any = dist
    if place[0] == "file":
        return stores.FileStore(place[1], size)
    return stores.TCPStore(place[1], place[2], size, is_master=False, timeout=STORE_TIMEOUT)
