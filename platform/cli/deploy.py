"""`outrider deploy`: replicas of the server on a Ray cluster."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import signal
import socket
import sys
import threading
import uuid
from typing import Any

from ..core.config import EngineArgs
from ..core.errors import InvalidRequestError, OutriderError
from ..core.text import shorten
from ..http.server import InterruptedStartError, bind
from ..http.server_config import ServerConfig
from . import serve
from .options.option_types import integer
from .options.parser import Parser

NAME = "outrider"
"""Name of the Ray Serve application."""
CONNECT_SECONDS = 5.0
"""Seconds for a TCP connection to the cluster's address."""
_EPILOG = """\
examples:
  outrider deploy --num-replicas 2                      two replicas of the demo model on this machine
  outrider deploy ./model --database postgresql://... --num-replicas 4 --replica-gpus 1 --ray-address auto

All options of `outrider serve` hold for each replica. By the database they share tenants, keys, limits, adapters and
the ledger.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "deploy",
        usage="outrider deploy [MODEL] [options]",
        allow_abbrev=False,
        help="serve a model over HTTP by replicas on a Ray cluster",
        description="Serve a model by several replicas on a Ray cluster. A request goes to one that has its adapter.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_model(parser)
    group = parser.add_argument_group("replicas")
    group.add_argument("--num-replicas", type=integer(1), default=1, metavar="N", help="replicas, or the fewest (1)")
    group.add_argument(
        "--max-replicas", type=integer(1), metavar="N", help="most replicas, as load grows (default: --num-replicas)"
    )
    group.add_argument(
        "--target-requests", type=integer(1), default=32, metavar="N",
        help="requests at once of a replica above which another one is started (32)",
    )  # fmt: skip
    group.add_argument("--replica-cpus", type=float, default=1.0, metavar="N", help="Ray's CPUs of each replica (1)")
    group.add_argument("--replica-gpus", type=float, default=0.0, metavar="N", help="Ray's GPUs of each replica (0)")
    group.add_argument(
        "--ray-address", metavar="ADDRESS", help="cluster to use: auto, or its address (default: one on this machine)"
    )
    serve.add_options(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Deploy, and serve until a signal; returns the exit status."""
    if importlib.util.find_spec("ray") is None:
        raise InvalidRequestError("outrider deploy needs pip install 'outrider[serve,ray]'")
    most = namespace.max_replicas or namespace.num_replicas
    if most < namespace.num_replicas:
        namespace.parser.error(f"argument --max-replicas: must be at least --num-replicas, {namespace.num_replicas}")

    def work(args: EngineArgs, config: ServerConfig) -> int:
        if args.tensor_parallel_size > 1 and args.distributed_executor_backend == "ray":
            raise InvalidRequestError(
                "outrider deploy has the ranks of a replica on its machine: mp", param="distributed_executor_backend"
            )
        from ..replicas.deployment import Place, ReplicaPlan, build_app

        config = dataclasses.replace(config, shared_limits=config.database is not None)
        plan = ReplicaPlan(
            namespace.num_replicas, most, namespace.target_requests, namespace.replica_cpus, namespace.replica_gpus
        )
        place = Place(os.getcwd(), namespace.kernel_configs, uuid.uuid4().hex)
        return _deploy(config, namespace.ray_address, build_app(args, config, plan, place), place.command)

    return serve.run_with(namespace, work)


def _deploy(config: ServerConfig, address: str | None, app: Any, command: str) -> int:
    import ray
    from ray import serve as ray_serve

    for name, why in config.without_effect.items():
        print(f"{name} has no effect: {why}", file=sys.stderr)
    if address is None:  # on a cluster the port is of another machine
        bind(config.host, config.port).close()
    ended = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if not started:
            raise InterruptedStartError("stopped before the replicas were ready")
        ended.set()

    started = upgrades = False
    start_ray(ray, address)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has set its own
            signal.signal(number, on_signal)
        ray_serve.start(http_options={"host": config.host, "port": config.port})
        upgrades = NAME in ray_serve.status().applications
        ray_serve.run(app, name=NAME, route_prefix="/")
        started = True
        where = f"at http://{config.host}:{config.port}" if address is None else "at the address of the cluster's Serve"
        print(f"Outrider serves {where}", flush=True)
        ended.wait()
    except InterruptedStartError:
        return 0
    except RuntimeError as error:
        raise OutriderError(f"the replicas do not start, for the reason above ({_line(error)})") from None
    except OutriderError:
        raise
    except Exception as error:  # Ray's errors have no common base
        raise OutriderError(f"Ray failed: {_line(error)}") from None
    finally:
        serving, started = started, True  # a second signal does not stop the end
        if address is not None:  # others may have applications there
            if _is_own(ray_serve, command) if serving else not upgrades:
                ray_serve.delete(NAME, _blocking=serving)
        elif serving:  # else there is nothing to drain
            ray_serve.shutdown()
        ray.shutdown()
    return 0


def start_ray(ray: Any, address: str | None) -> None:
    """Connect to the cluster, or start Ray on this machine: never a cluster that happens to be there.

    Raises:
        InvalidRequestError: there is no such cluster. OutriderError: Ray does not start.
    """
    if address is not None:
        _check_reachable(address)
    try:
        ray.init(address=address or "local", include_dashboard=False)
    except Exception as error:  # Ray's errors have no common base
        if address is not None:
            raise InvalidRequestError(
                f"argument --ray-address: cannot connect to the Ray cluster {shorten(address)!r}: {_line(error)}",
                param="ray_address",
            ) from None
        raise OutriderError(f"Ray does not start on this machine: {_line(error)}") from None


def _check_reachable(address: str) -> None:
    """Refuse a HOST:PORT that does not accept connections; Ray itself tries for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", or Ray knows what it means
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise InvalidRequestError(
            f"argument --ray-address: nothing listens at {shorten(address)}: {error}", param="ray_address"
        ) from None


def _line(error: Exception) -> str:
    """First line of an error of Ray, whose messages may have many."""
    return shorten(str(error).strip().partition("\n")[0]) or type(error).__name__


def _is_own(ray_serve: Any, command: str) -> bool:
    """True if the running application is this command's: a later command may have deployed its own."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        return bool(ray_serve.get_app_handle(NAME).command.remote().result(timeout_s=10) == command)
    except (RayError, RayServeException, TimeoutError):  # it is gone, or its owner is unknown
        print(f"the application {NAME} does not answer and is left as it is; `serve shutdown` ends it", file=sys.stderr)
        return False
