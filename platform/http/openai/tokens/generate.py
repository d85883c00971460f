"""`POST /inference/v1/generate`: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....client.prepared import ParsedPrompt
from ....core.model_limits import check_token_ids
from ...body.reader import documented
from ..answer import accept
from ..event_stream import Chunk, ChunkWriter, dumps
from ..generation import Collected, usage_of
from ..job import Event, Job
from ..logprobs import Packed, Shown, chat_logprobs, pack, prompt_logprobs
from ..thinking import add_marks
from .protocol import GenerateRequest

router = APIRouter()

ENDPOINT = "/inference/v1/generate"


@router.post(ENDPOINT, response_model=None, openapi_extra=documented(GenerateRequest))
async def generate(request: Request) -> Response:
    """Continue a prompt of token ids."""
    accepted = await accept(request, GenerateRequest)
    body, llm = accepted.body, accepted.serving.llm
    check_token_ids("token_ids", body.token_ids, llm.input_processor.num_ids(accepted.lora))
    params = body.sampling_params.sampling_params({})
    await add_marks(accepted.serving, params, accepted.lora)
    job = await accepted.prepare(
        [ParsedPrompt(body.token_ids, field="token_ids")],
        params,
        prefix="gen",
        default_max_tokens=accepted.defaults.get("max_tokens"),
        endpoint=ENDPOINT,
    )
    fixed = {"request_id": body.request_id or job.request_id}
    choices = _TokenChoices(job)
    writer = ChunkWriter(fixed, choices, body.stream_options, job, with_metrics=False) if body.stream else None

    async def whole(collected: Collected) -> dict[str, Any]:
        return fixed | choices.answer(collected)

    return await accepted.run(job, writer, whole)


class _TokenChoices:
    """Writer of choices, of the whole answer and of chunks."""

    def __init__(self, job: Job) -> None:
        params = job.prepared[0].params
        self._shown: Shown | None = params.logprob_token_ids or params.logprobs

    def answer(self, collected: Collected) -> dict[str, Any]:
        """The whole answer but its id. `usage` and `stop_reason` are ours."""
        [prompt] = collected.prompts
        return {
            "choices": [
                {
                    "index": index,
                    "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "token_ids": choice.token_ids,
                }
                for index, choice in enumerate(collected.choices)
            ],
            "usage": usage_of(collected.job),
            "prompt_logprobs": None if prompt.logprobs is None else prompt_logprobs(prompt.logprobs),
            "kv_transfer_params": None,
        }

    def choices(self, event: Event) -> list[Chunk]:
        """See ChunkEncoder."""
        chunks: list[Chunk] = []
        for output in event.output.outputs:
            if not output.token_ids and output.finish_reason is None:
                continue
            if self._shown is None and output.finish_reason is None:
                chunks.append(
                    f'{{"index":{output.index},"logprobs":null,"finish_reason":null,'
                    f'"token_ids":{dumps(output.token_ids)}}}'
                )
                continue
            choice: dict[str, Any] = {
                "index": output.index,
                "logprobs": self._logprobs(output.token_ids, list(map(pack, output.logprobs or ()))),
                "finish_reason": output.finish_reason,
                "token_ids": output.token_ids,
            }
            if output.finish_reason is not None:
                choice["stop_reason"] = output.stop_reason
            chunks.append(choice)
        return chunks

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[Packed]) -> dict[str, Any] | None:
        return None if self._shown is None else chat_logprobs(token_ids, entries, self._shown, as_ids=True)
