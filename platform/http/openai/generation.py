"""Generation for a checked request: several prompts at once, counted for usage and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import OutriderError
from ...core.outputs import CompletionOutput, Logprob, RequestOutput
from ...core.tasks import cancel
from ..observe.generations import Generation, sum_speculation
from ..observe.request_log import current_log
from ..protect.accounting import admitted
from ..serving_state import Serving
from .beams import beam_outputs
from .job import Event, Job
from .logprobs import Packed, pack


async def generate(serving: Serving, job: Job) -> AsyncGenerator[Event]:
    """The job's outputs as they come; closing the generator aborts what still runs.

    On a server with tenants the job is admitted first, at the first step, and when the generator has ended its row is
    in the ledger.

    Raises:
        OutriderError: the limits refuse the job, too many wait, or the engine fails.
    """
    async with admitted(serving, job) as checkpoint:
        job.generations = [Generation(prepared, job.counts) for prepared in job.prepared]
        log = current_log()
        if log is not None:
            log.begin(job.generations)
        if len(job.prompts) > 1:
            async with aclosing(_merge(serving, job)) as events:
                async for event in events:
                    checkpoint()
                    yield event
            return
        with serving.queue.enter_engine(job.params.n), _recorded(serving, job, 0) as record:
            async with aclosing(_outputs(serving, job, 0)) as outputs:
                async for output in outputs:
                    record(output)
                    checkpoint()
                    yield Event(0, output)


def _outputs(serving: Serving, job: Job, index: int) -> AsyncGenerator[RequestOutput]:
    if job.beam is not None:
        return beam_outputs(serving, job, index)
    return serving.llm.run(job.prepared[index], delta=True)


@contextmanager
def _recorded(serving: Serving, job: Job, index: int) -> Iterator[Callable[[RequestOutput], None]]:
    """Count a prompt's outputs, with which the result is called, and its end, for usage and metrics."""
    generation = job.generations[index]
    recorder = serving.metrics.recorder(generation, job.principal.tenant)

    def record(output: RequestOutput) -> None:
        generation.update(output)
        recorder.on_output(output)

    try:
        yield record
    except BaseException as error:
        is_refusal = isinstance(error, OutriderError) and error.status < 500
        if generation.ended_at is None and not is_refusal:
            generation.failure = "error" if isinstance(error, Exception) else "abort"  # cancelled, or closed
            recorder.on_end(generation.failure)
        raise


async def _merge(serving: Serving, job: Job) -> AsyncGenerator[Event]:
    """The events of all prompts, each as soon as it comes. The first error ends all."""
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            with _recorded(serving, job, index) as record:
                async with aclosing(_outputs(serving, job, index)) as outputs:
                    async for output in outputs:
                        record(output)
                        queue.put_nowait(Event(index, output))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    with serving.queue.enter_engine(job.num_sequences) as leave:
        tasks: list[asyncio.Task[None]] = []
        try:
            for index in range(len(job.prompts)):
                tasks.append(asyncio.create_task(pump(index)))
                await asyncio.sleep(0)  # other tasks run between the starts of two prompts
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                    leave(job.params.n)
                else:
                    yield item
        finally:
            await cancel(*tasks)


def usage_of(job: Job) -> dict[str, Any]:
    """The OpenAI `usage` object so far."""
    counts = job.counts
    return {
        "prompt_tokens": counts.prompt_tokens,
        "total_tokens": counts.prompt_tokens + counts.output_tokens,
        "completion_tokens": counts.output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def metrics_of(job: Job) -> dict[str, Any]:
    """Ours: counts of speculation, complete once the job has finished."""
    counts = sum_speculation(job.generations)
    return {
        "speculative_decoding": {
            "num_drafts": counts.num_verifications,
            "num_draft_tokens": counts.num_draft_tokens,
            "num_accepted_tokens": counts.num_accepted_tokens,
            "acceptance_rate": counts.acceptance_rate,
            "acceptance_length": counts.acceptance_length,
            "accepted_per_position": counts.acceptance_per_position,
            "steps_by_k": counts.steps_by_k,
        }
    }


def draft_fields(output: Choice | CompletionOutput) -> dict[str, list[str] | list[int]]:
    """Fields of a choice that show its verification steps, aligned with its tokens.

    `draft_status` is "drafted" for an accepted draft, "sampled" for a token that the model chose itself; a step ends
    with a sampled token. `rejected_drafts` is the number of drafts that the step ending with the token rejected.
    """
    return {
        "draft_status": ["drafted" if d else "sampled" for d in output.drafted or [False] * len(output.token_ids)],
        "rejected_drafts": output.rejected_drafts or [0] * len(output.token_ids),
    }


@dataclass(slots=True)
class Choice:
    """One complete sequence."""

    prompt_index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Packed] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    rejected_drafts: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


@dataclass(slots=True)
class PromptFacts:
    """Token ids and log-probabilities of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[dict[int, Logprob] | None] | None = None


@dataclass(slots=True)
class Collected:
    """A whole job's outputs, the choices in the order of their index."""

    choices: list[Choice]
    prompts: list[PromptFacts]
    job: Job


async def collect(events: AsyncGenerator[Event], job: Job) -> Collected:
    """Run a job to its end."""
    n = job.params.n
    result = Collected([Choice(i // n) for i in range(len(job.prompts) * n)], [PromptFacts() for _ in job.prompts], job)
    async with aclosing(events):
        async for event in events:
            index, output = event
            prompt = result.prompts[index]
            prompt.token_ids = output.prompt_token_ids
            prompt.logprobs = prompt.logprobs or output.prompt_logprobs
            for completion in output.outputs:
                choice = result.choices[index * n + completion.index]
                choice.texts.append(completion.text)
                choice.token_ids += completion.token_ids
                choice.logprobs += map(pack, completion.logprobs or ())
                choice.drafted += completion.drafted or [False] * len(completion.token_ids)
                choice.rejected_drafts += completion.rejected_drafts or [0] * len(completion.token_ids)
                if completion.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason = completion.finish_reason, completion.stop_reason
    return result
