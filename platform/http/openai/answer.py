"""From a generating request to its answer: the steps that all APIs which generate text share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ...client.prepared import ParsedPrompt, Prepared
from ...client.prompts import has_new_constraint
from ...core.errors import InvalidRequestError
from ...core.lora_request import LoRA
from ...core.outputs import CompletionOutput
from ...core.sampling_params import SamplingParams
from ..adapters.adapter_choice import choose_adapter, discover_adapters
from ..body.body_memory import HeldBody
from ..body.lenient import ignore
from ..body.reader import read_waiting_body
from ..observe.request_log import MAX_IGNORED_NAME
from ..protect.accounting import check_call, limit_headers
from ..protect.acting import acting_in
from ..serving_state import Serving, new_request_id, principal_of, serving_of
from .event_stream import ChunkEncoder, ChunkWriter, StreamWriter, stream_response, until_disconnect
from .generation import Choice, Collected, collect, draft_fields, generate
from .job import Arrival, Job, now
from .json_pieces import json_answer
from .protocol import ModelFields, SamplingFields

BodyT = TypeVar("BodyT", bound=ModelFields)


@dataclass(frozen=True, slots=True)
class Accepted(Generic[BodyT]):
    """A request whose body, model and limits have been checked, before its prompt is tokenized."""

    request: Request
    serving: Serving
    body: BodyT
    lora: LoRA | None
    model: str
    """Name of the model in the answer."""
    defaults: Mapping[str, Any]
    """Sampling parameters that the body may leave out."""
    arrival: Arrival
    held: HeldBody

    async def prepare(self, prompts: list[ParsedPrompt], params: SamplingParams, *, prefix: str, **fields: Any) -> Job:
        """The job for these prompts, tokenized and checked; `prefix` begins its id, `fields` are further ones of `Job`.

        Prompts and parameters are not checked again in this process, except by beam search, whose sequences are
        prepared one by one. The limits, and the state of the server, the engine and the adapter, are checked again when
        the job runs, since they may have changed. The engine checks every request that it gets. Keywords of a schema
        that do not hold are named as ignored.

        Raises:
            InvalidRequestError: a prompt or parameter is refused, or a keyword is ignored with --strict-fields.
            ConstraintCheckError: as the constraint checker's.
        """
        job = Job(
            new_request_id(prefix),
            prompts,
            params,
            self.lora,
            self._priority(),
            self.body.cache_salt or "",
            principal=principal_of(self.request),
            model=self.model,
            arrival=self.arrival,
            on_admitted=self.held.close,
            **fields,
        )
        job.bound_logprobs(self.serving.llm.info)
        if has_new_constraint(params):
            job.prepared = await until_disconnect(self.request, self._with_constraint(job))
        else:
            job.prepared = await self._prepared(job)
        strict = self.serving.config.strict_fields
        for place in job.prepared[0].ignored_keywords:
            head = place.split(".", 1)[0]
            name = place if len(place) <= MAX_IGNORED_NAME else f"{head}...{place[len(head) + 3 - MAX_IGNORED_NAME :]}"
            ignore(name, strict=strict)
        return job

    async def _with_constraint(self, job: Job) -> list[Prepared]:
        async with self.serving.constraint_locks.of(job.principal.tenant):
            return await self._prepared(job)

    async def _prepared(self, job: Job) -> list[Prepared]:
        llm = self.serving.llm
        made: dict[int, Prepared] = {}
        # The longest is first: an error names it.
        for index in sorted(range(len(job.prompts)), key=lambda i: -job.prompt_lengths[i]):
            if made:
                await asyncio.sleep(0)  # other tasks run between the checks of two prompts
            made[index] = await llm.prepare(
                job.prompts[index],
                job.params,
                job.id_of(index),
                lora_request=job.lora,
                default_max_tokens=job.default_max_tokens,
                arrival_time=job.arrival.monotonic,
                **job.options,
            )
        return [made[index] for index in range(len(job.prompts))]

    def _priority(self) -> int:
        """The body's priority; else 0, or that of a batch's lines."""
        if self.body.priority is not None:
            return self.body.priority
        acting = acting_in(self.request.scope)
        return 0 if acting is None else acting.priority

    async def respond(
        self,
        job: Job,
        kind: str,
        encoder: ChunkEncoder,
        answer: Callable[[Collected], dict[str, Any]],
        *,
        in_thread: bool = False,
    ) -> Response:
        """Run the job and answer, in chunks if the body asks for a stream.

        Args:
            kind: the answer's `object`.
            answer: makes the other fields of a whole answer.
            in_thread: call it in a thread, since it takes long.
        """
        fixed = {
            "id": job.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": None,
        }
        body = self.body
        assert isinstance(body, SamplingFields), "routes that pool have answers of their own"
        writer = None
        if body.stream:
            writer = ChunkWriter(fixed, encoder, body.stream_options, job, with_metrics=bool(body.return_metrics))

        async def whole(collected: Collected) -> dict[str, Any]:
            return fixed | (await asyncio.to_thread(answer, collected) if in_thread else answer(collected))

        return await self.run(job, writer, whole)

    async def run(
        self, job: Job, writer: StreamWriter | None, whole: Callable[[Collected], Awaitable[dict[str, Any]]]
    ) -> Response:
        """Run the job and answer: in the events of `writer`, or without one by the JSON that `whole` makes."""
        events = generate(self.serving, job)
        if writer is not None:
            return await stream_response(self.request, events, writer)
        collected = await until_disconnect(self.request, collect(events, job))
        return await json_answer(await whole(collected), limit_headers(self.request))


async def accept(request: Request, kind: type[BodyT]) -> Accepted[BodyT]:
    """Read a body and check all that can be checked before a prompt is made of it.

    Raises:
        OutriderError: the body is wrong, its model does not exist, or the server or the limits refuse the request.
    """
    arrival, serving = now(), serving_of(request)
    body, held = await read_waiting_body(request, kind)
    body.check()
    models = serving.models.seen_by(principal_of(request))
    await discover_adapters(models, body)
    lora, model = choose_adapter(models, body)
    serving.check_ready()
    check_call(request)
    defaults = await serving.llm.sampling_defaults.of(lora)
    return Accepted(request, serving, body, lora, model, defaults, arrival, held)


def asked_fields(body: SamplingFields, output: Choice | CompletionOutput) -> dict[str, Any]:
    """Fields of a choice that only some requests ask for."""
    fields: dict[str, Any] = {"token_ids": output.token_ids} if body.return_token_ids else {}
    return fields | draft_fields(output) if body.return_draft_status else fields


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The error with another API's names of a chat's fields: `names` maps ours to them."""
    for ours, theirs in names.items():
        error.message = error.message.replace(ours, theirs, 1)
        error.param = error.param and error.param.replace(ours, theirs)
    return error
