"""Starts the other ranks as actors of Ray, on one machine or several. Needs the package ray.

    placement group    one bundle a rank; the first one is on this process's machine, whose device it reserves
    actor of a rank    connects to rank 0 by a socket and runs the loop of `rank_process` on it

Ray places, watches and kills the ranks. Passes go over the sockets, since a message of Ray's takes longer than a pass.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...core.config import EngineConfig
from ...core.errors import EngineDeadError, InvalidRequestError, invalid
from .launch import THIS_MACHINE, RankSite, RemoteRank

logger = logging.getLogger(__name__)

_ROOM_SECONDS = 300.0
"""Longest wait for resources of the cluster that are in use."""
_START_SECONDS = 300.0
"""Longest time until an actor's process has started and connected."""
_TOKEN_BYTES = 32
_MAX_REASON = 500
"""Characters of Ray's description of a death; the rest is in its logs."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keepalive: seconds until the first probe, between two probes, and their number."""


class RankActor:
    """Actor of a rank, and of the device that rank 0 has."""

    def devices(self) -> list[str]:
        """Ids of the GPUs that Ray has given it."""
        return [str(name) for name in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    def work(self, address: tuple[str, int], token: bytes, rank: int) -> None:
        """Connect to rank 0 and execute its messages, until it is gone."""
        from .rank_process import run

        with socket.create_connection(address, _START_SECONDS) as link:
            link.settimeout(None)
            _prepare_link(link)
            link.sendall(token + rank.to_bytes(4, "little"))
            with contextlib.suppress(EOFError, ConnectionError):
                run(link)


class RayRank:
    """A rank in an actor. Implements `RemoteRank`, once it has a link."""

    link: socket.socket

    def __init__(self, actor: Any, done: Any) -> None:
        """`done`: future of `RankActor.work`."""
        self._actor = actor
        self._done = done

    def ended(self, seconds: float = 2.0) -> str | None:
        """See `RemoteRank`. Waits a little: its socket closes before Ray reports its exit."""
        if not ray.is_initialized():  # `wait` would start it again
            return "Ray was shut down"
        if not ray.wait([self._done], timeout=seconds)[0]:
            return None
        try:
            ray.get(self._done)
        except RayError as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}"
        return "its loop ended"

    def end(self) -> None:
        """See `RemoteRank`."""
        if hasattr(self, "link"):
            self.link.close()
        if ray.is_initialized():  # else it is gone with its actors, and `kill` would start it again
            with contextlib.suppress(Exception):
                ray.kill(self._actor)


class RayLaunch:
    """Ranks in actors of a placement group. Implements `Launch`."""

    def __init__(self, config: EngineConfig) -> None:
        """Reserve resources of the cluster, and start the actors there.

        Raises:
            InvalidRequestError: the cluster is too small. EngineDeadError: there is no cluster, it stays full, or an
                actor does not start.
        """
        self.remote: list[RemoteRank] = []
        self._actors: list[RayRank] = []
        self._holder: Any = None
        self._store: Any = None
        self._group: PlacementGroup | None = None
        self._device = config.device
        _connect()
        try:
            self._group = _ask_for_room(config)
            _wait_for_room(self._group, config.num_ranks)
            self.sites = _sites(self._group)
            if self._device == "cuda":
                self._take_own_device()
            self._start_actors()
            self._store = self._make_store()
        except RayError as error:
            self.close()
            raise EngineDeadError(f"distributed_executor_backend ray: {error}") from error
        except BaseException:
            self.close()
            raise
        self.store: list[Any] = ["tcp", self.sites[0].address, self._store.port]

    def open_store(self) -> Any:
        """See `Launch`."""
        return self._store

    def close(self) -> None:
        """See `Launch`."""
        for rank in self._actors:
            rank.end()
        self._actors.clear()
        self.remote.clear()
        self._store = None
        if self._group is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # the cluster is gone
                remove_placement_group(self._group)  # ends the actors in it
        self._group = None

    def _make_store(self) -> Any:
        """Store that listens at this machine's address only: by default it would at all addresses."""
        from .collectives import STORE_TIMEOUT

        address = self.sites[0].address
        with _listen(address) as server:
            port, own = server.getsockname()[1], server.detach()
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": STORE_TIMEOUT}
        # The libuv server leaves descriptors open if it cannot start; for a few ranks the other one is as good.
        options |= {"master_listen_fd": own, "use_libuv": False}
        return torch.distributed.TCPStore(address, port, len(self.sites), **options)  # type: ignore[attr-defined]

    def _take_own_device(self) -> None:
        """Reserve rank 0's GPU: the actor of the first bundle holds it, and this process uses it."""
        self._holder = self._make_actor(0)  # kept: an actor without references ends
        (name,) = ray.get(self._holder.devices.remote(), timeout=_START_SECONDS)
        index = device_index(name, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.sites[0] = self.sites[0]._replace(device_index=index)
        torch.cuda.set_device(index)

    def _make_actor(self, rank: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, rank)
        return (
            ray.remote(RankActor)
            .options(
                **_resources(self._device, "num_cpus", "num_gpus"),
                max_restarts=0,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self.sites[rank].num_threads)}},
            )
            .remote()
        )

    def _start_actors(self) -> None:
        """Start the actors; returns when each has connected and proved its identity."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        with _listen(self.sites[0].address) as server:
            address = server.getsockname()[:2]
            for rank in range(1, len(self.sites)):
                actor = self._make_actor(rank)
                self._actors.append(RayRank(actor, actor.work.remote(address, token, rank)))
            missing = set(range(1, len(self.sites)))
            server.settimeout(1.0)
            ends = time.monotonic() + _START_SECONDS
            while missing:
                for rank in missing:
                    if (how := self._actors[rank - 1].ended(0)) is not None:
                        raise EngineDeadError(f"rank {rank} of {len(self.sites)} ended while it started: {how}")
                if time.monotonic() > ends:
                    raise EngineDeadError(f"ranks {sorted(missing)} did not connect within {_START_SECONDS:.0f} s")
                with contextlib.suppress(TimeoutError):
                    link, _ = server.accept()
                    _prepare_link(link)
                    greeted = _greeted(link, token)
                    if greeted is not None and greeted in missing:
                        missing.remove(greeted)
                        self._actors[greeted - 1].link = link
                    else:
                        link.close()
        self.remote += self._actors


def device_index(name: str, visible: str | None) -> int:
    """Index of the GPU that Ray calls `name` in a process with this CUDA_VISIBLE_DEVICES (None: it sees all).

    Raises:
        InvalidRequestError: the process does not see it.
    """
    names = None if visible is None else [part.strip() for part in visible.split(",")]
    if names is None and name.isdecimal():
        return int(name)
    if names is None or name not in names:
        raise InvalidRequestError(
            f"Ray has given GPU {name} to rank 0, whose process does not see it (CUDA_VISIBLE_DEVICES {visible!r})",
            param="distributed_executor_backend",
        )
    return names.index(name)


def _connect() -> None:
    """Connect to RAY_ADDRESS or the cluster of this machine, or start one for this process."""
    if ray.is_initialized():
        return
    with _kept_handlers():
        try:
            ray.init(include_dashboard=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineDeadError(f"distributed_executor_backend ray: no cluster ({error})") from error


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Restore signal handlers: Ray replaces that of SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _resources(device: str, cpu: str, gpu: str) -> dict[str, float]:
    """Resources of a rank, by Ray's names."""
    return {cpu: 0, gpu: 1} if device == "cuda" else {cpu: 1}


def _ask_for_room(config: EngineConfig) -> PlacementGroup:
    """Group with room for all ranks, once ready: on one machine if they fit, else on as few as possible."""
    size, each = config.num_ranks, {k: n for k, n in _resources(config.device, "CPU", "GPU").items() if n}
    there = ray.cluster_resources()
    for name, count in each.items():
        if there.get(name, 0) < count * size:
            raise invalid(
                "tensor_parallel_size",
                f"{size} needs {count * size:g} {name} of Ray's cluster, which has {there.get(name, 0):g}",
            )
    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    names = [name for name in node["Resources"] if name.startswith("node:") and name != "node:__internal_head__"]
    own = dict.fromkeys(names, 0.001)  # each machine has one, of its address
    return placement_group([each | own, *[dict(each) for _ in range(1, size)]], strategy="PACK")


def _wait_for_room(group: PlacementGroup, size: int) -> None:
    if group.wait(5):
        return
    logger.warning("Waiting for room for %d ranks on Ray's cluster; available: %s", size, ray.available_resources())
    if not group.wait(_ROOM_SECONDS):
        raise EngineDeadError(
            f"tensor_parallel_size {size}: for {_ROOM_SECONDS:.0f} s Ray's cluster had no room for {size} ranks, one "
            "of them on this machine"
        )


def _addresses() -> dict[str, str]:
    """Address of each machine of the cluster, by its id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def _sites(group: PlacementGroup) -> list[RankSite]:
    """Sites of the ranks, in their order."""
    addresses = _addresses()
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
    bundles = placement_group_table(group)["bundles_to_node_id"]
    places = [bundles[rank] for rank in range(len(bundles))]
    together = Counter(places)
    return [
        RankSite(
            THIS_MACHINE if len(together) == 1 else addresses[place],
            together[place],
            max(1, cores[place] // together[place]),
            0,  # an actor sees its own GPU alone
        )
        for place in places
    ]


def _listen(address: str) -> socket.socket:
    """Server at a free port of an address of IPv4 or IPv6."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def _prepare_link(link: socket.socket) -> None:
    """Send small messages at once, and notice within half a minute that the other machine is gone."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _greeted(link: socket.socket, token: bytes) -> int | None:
    """Rank that has connected; None: it is not one of ours."""
    link.settimeout(5.0)
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < _TOKEN_BYTES + 4 and (part := link.recv(_TOKEN_BYTES + 4 - len(said))):
            said += part
    link.settimeout(None)
    if not hmac.compare_digest(said[:_TOKEN_BYTES], token):
        return None
    return int.from_bytes(said[_TOKEN_BYTES:], "little")
