"""Sums and copies between ranks, by torch.distributed. Only processes that are ranks import this."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist

from ...core.errors import InvalidRequestError
from .launch import THIS_MACHINE

_TIMEOUT = timedelta(minutes=5)
"""Longest wait of a rank for the others in one operation."""


class ProcessRanks:
    """Implements `models.parallel.Ranks` by a group of its own: a process may have several engines."""

    def __init__(self, store: Any, rank: int, size: int, device: str, address: str) -> None:
        """Join the group; returns when all have joined. gloo on a CPU, NCCL on GPUs.

        Args:
            store: A store of torch.distributed, by which the ranks find each other.
            rank: Number of this process.
            size: Number of processes.
            device: "cpu" or "cuda".
            address: Address at which gloo listens; the variable GLOO_SOCKET_IFNAME names another interface.
        """
        if not dist.is_available():
            raise InvalidRequestError(
                "this build of torch has no torch.distributed, which tensor_parallel_size needs",
                param="tensor_parallel_size",
            )
        self.rank, self.size = rank, size
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        gloo: Any = dist.ProcessGroupGloo
        if device == "cuda":
            options = nccl.Options()
            options._timeout = _TIMEOUT
            self._group: Any = nccl(store, rank, size, options)
            return
        options = gloo._Options()
        options._timeout = _TIMEOUT
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "") if address != THIS_MACHINE else ""
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_device(address)]
        self._group = gloo(store, rank, size, options)

    def sum(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        self._group.allreduce(x).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        found = x.new_empty((self.size * len(x), *x.shape[1:]))
        self._group._allgather_base(found, x.contiguous()).wait()
        return found.view(self.size, *x.shape)

    def copy_first(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place of every other rank's."""
        self._group.broadcast(x, 0).wait()
        return x


def open_store(place: list[Any], size: int) -> Any:
    """Store at a place: ["file", path], or ["tcp", host, port]."""
    stores: Any = dist
    if place[0] == "file":
        return stores.FileStore(place[1], size)
    return stores.TCPStore(place[1], place[2], size, is_master=False, timeout=_TIMEOUT)
