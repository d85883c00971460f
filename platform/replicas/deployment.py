"""Ray Serve deployments: an ingress that forwards requests, and the replicas that answer them. Needs `ray[serve]`."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..client.kernel_configs import use_kernel_configs
from ..core.config import EngineArgs
from ..core.errors import EngineDeadError
from ..core.logs import REQUEST_LOGGER, set_up_logging
from ..http.app import key_in
from ..http.protect.error_responses import BodyTooLargeError, error_response
from ..http.server_config import ServerConfig
from ..tenancy.accounts.authenticator import hash_key
from .replica import ForwardedRequest, Replica
from .routing import AffinityRouter, ReplicaView, RoutingKey, routing_key
from .scaling import replicas_needed

logger = logging.getLogger(__name__)

_LONG_BODY = 1 << 16
"""Bytes of a body above which it is read in a thread, so that other streams continue."""
_KEY_SECONDS = 10.0
"""Seconds for which an ingress trusts a key after a replica has found it right."""
_MAX_KEYS = 10_000
"""Keys that an ingress remembers."""
_STATS_SECONDS = 1.0
"""Seconds between two looks at the adapters that a replica has."""
KV_USAGE = "kv_cache_usage"
"""Name of the share of KV blocks in use, for Ray's autoscaler."""
_HOP_HEADERS = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"upgrade"))
_NOT_FORWARDED = _HOP_HEADERS | {b"x-request-id"}  # which Ray adds to every answer


class ReplicaPlan(NamedTuple):
    """Numbers of replicas, and resources of each."""

    num_replicas: int
    max_replicas: int
    target_requests: int
    """Requests at once of a replica above which another one is started; so it is by use of the KV cache."""
    num_cpus: float
    num_gpus: float


class Place(NamedTuple):
    """Place of the command, for replicas on its machine or with the same files."""

    folder: str
    """Working folder, which relative paths of the options begin in."""
    kernel_configs: str | None
    command: str
    """Id of the command."""


class AdapterRouter(RequestRouter):
    """Ray's router with our choice. Each ingress has one, with a view of its own."""

    def initialize_state(self, **options: Any) -> None:
        """See RequestRouter."""
        self._views: dict[ReplicaID, ReplicaView] = {}
        self._seen: dict[ReplicaID, dict[str, Any]] = {}
        self._chooser: AffinityRouter[ReplicaID] = AffinityRouter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See RequestRouter."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        views = self._current(replicas)
        ranked = self._chooser.rank(views, _routing_key(pending_request))
        return [[replicas[name]] for name in ranked]

    def _current(self, replicas: dict[ReplicaID, RunningReplica]) -> dict[ReplicaID, ReplicaView]:
        self._views = {name: self._views.get(name) or ReplicaView() for name in replicas}
        for name, replica in replicas.items():
            stats = replica.routing_stats
            if stats and stats != self._seen.get(name):  # else it would forget what it was given since
                self._views[name].observe(stats["adapters"], stats["slots"])
                self._views[name].ready = stats["ready"]
        self._seen = {name: replica.routing_stats for name, replica in replicas.items()}
        return self._views

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """See RequestRouter."""
        if replica_id in self._views:
            self._views[replica_id].ongoing += 1
            self._views[replica_id].give(_routing_key(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See RequestRouter."""
        if replica_id in self._views:
            self._views[replica_id].ongoing -= 1


def _routing_key(pending: PendingRequest | None) -> RoutingKey:
    return pending.args[0] if pending is not None and pending.args else RoutingKey()


def scale(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Number of replicas that Ray should have; Ray rounds, bounds and delays it."""
    usage = (context.aggregated_metrics or {}).get(KV_USAGE, {})
    target = context.config.get_target_ongoing_requests()
    return replicas_needed(context.total_num_requests, target, usage.values()), {}


class Engine:
    """Deployment of replicas."""

    async def __init__(self, args: EngineArgs, config: ServerConfig, place: Place) -> None:  # type: ignore[misc]
        set_up_logging(config.log_level.upper(), config.log_format, "replica", prompts=config.log_prompts)
        logging.getLogger(REQUEST_LOGGER).setLevel(logging.INFO if config.log_requests else logging.WARNING)
        if os.path.isdir(place.folder):
            os.chdir(place.folder)
        use_kernel_configs(place.kernel_configs)
        if args.kv_events_config is not None:
            args.data_parallel_rank = serve.get_replica_context().rank.rank  # each replica has ports of its own
        self._replica = Replica(args, config, serve.get_replica_context().replica_id.unique_id)
        await self._replica.start()

    async def answer(self, key: RoutingKey, request: ForwardedRequest) -> AsyncIterator[dict[str, Any]]:
        """Answer a request; `key` is the routers'."""
        async for message in self._replica.answer(request):
            yield message

    async def refusal(self, key: RoutingKey, request: ForwardedRequest) -> list[dict[str, Any]] | None:
        """See Replica; `key` is the routers'."""
        return await self._replica.refusal(request)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Report to the routers what the replica has."""
        return await self._replica.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to `scale` what the replica uses."""
        return {KV_USAGE: await self._replica.kv_usage()}

    def check_health(self) -> None:
        """Raise when the engine is dead for good: Ray then starts another replica."""
        self._replica.check()

    async def __del__(self) -> None:
        """Drain: Ray calls it before it ends a replica."""
        await self._replica.stop()


class Ingress:
    """Deployment that takes HTTP requests and forwards them whole."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int, command: str) -> None:
        self._replicas = replicas
        self._max_body_bytes = max_body_bytes
        self._command = command
        self._right_keys: dict[bytes, float] = {}  # digest -> time until which a replica need not be asked

    def command(self) -> str:
        """Id of the command that deployed it."""
        return self._command

    async def __call__(self, request: Request) -> Response:
        """Forward a request; its answer is a stream. Without a valid key no body is read."""
        try:
            return await self._refusal(request) or await self._answer(request)
        except RayError as error:
            logger.warning("a replica did not answer: %s", type(error).__name__)
            return error_response(EngineDeadError("The replica that had the request has ended; try again"))

    async def _refusal(self, request: Request) -> Response | None:
        """A replica's answer to a wrong key of a request with a body; None: it is right, and is so for a while. The
        replica that answers checks the key itself."""
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            return None
        digest, now = hash_key(key_in(request.headers)), time.monotonic()
        if self._right_keys.get(digest, 0.0) > now:
            return None
        messages = await self._replicas.refusal.remote(RoutingKey(), _forwarded(request, b""))
        if messages is None:
            if len(self._right_keys) >= _MAX_KEYS:
                self._right_keys.clear()
            self._right_keys[digest] = now + _KEY_SECONDS
            return None
        return _started(messages[0], Response(b"".join(message.get("body", b"") for message in messages)))

    async def _answer(self, request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body_bytes:
                return error_response(BodyTooLargeError(f"The body is longer than {self._max_body_bytes} bytes"))
        whole = bytes(body)
        key = await asyncio.to_thread(routing_key, whole) if len(whole) > _LONG_BODY else routing_key(whole)
        messages = self._replicas.options(stream=True).answer.remote(key, _forwarded(request, whole))
        start = await anext(messages)

        async def content() -> AsyncIterator[bytes]:
            try:
                async for message in messages:
                    if message.get("body"):
                        yield message["body"]
            finally:
                messages.cancel()

        return _started(start, StreamingResponse(content()))


def _forwarded(request: Request, body: bytes) -> ForwardedRequest:
    scope = request.scope
    headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
    headers.append((b"content-length", b"%d" % len(body)))
    path = scope["path"].removeprefix(scope.get("root_path", "") or "") or "/"
    client = tuple(scope["client"]) if scope.get("client") else None
    return ForwardedRequest(scope["method"], path, scope["query_string"], headers, body, client)


def _started(start: dict[str, Any], response: Response) -> Response:
    """The response with the status and the headers of an answer's first message."""
    response.status_code = start["status"]
    response.raw_headers = [pair for pair in start["headers"] if pair[0].lower() not in _NOT_FORWARDED]
    return response


def build_app(args: EngineArgs, config: ServerConfig, plan: ReplicaPlan, place: Place) -> serve.Application:
    """Ray Serve application: `serve.run(build_app(...))`."""
    numbers: dict[str, Any] = {"num_replicas": plan.num_replicas}
    if plan.max_replicas > plan.num_replicas:
        numbers = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=plan.num_replicas,
                max_replicas=plan.max_replicas,
                target_ongoing_requests=plan.target_requests,
                policy=AutoscalingPolicy(policy_function=scale),
            )
        }
    engines = serve.deployment(
        Engine,
        name="Engine",
        max_ongoing_requests=100_000,  # the server itself bounds its queue, with an error that says so
        ray_actor_options={"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus},
        graceful_shutdown_timeout_s=config.shutdown_timeout + 10,
        health_check_timeout_s=600,
        request_router_config=RequestRouterConfig(
            request_router_class=AdapterRouter, request_routing_stats_period_s=_STATS_SECONDS
        ),
        **numbers,
    )
    ingress = serve.deployment(Ingress, name="Ingress", max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
    return ingress.bind(engines.bind(args, config, place), config.max_body_bytes, place.command)
