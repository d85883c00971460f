"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...client.text.no_tokenizer import needed
from ...client.text.vocabulary import TokenTexts, read_vocabulary
from ...core.outputs import CompletionOutput
from ...core.sampling_params import SamplingParams
from ..body.reader import documented
from .answer import Accepted, accept, asked_fields
from .beams import beam_params
from .event_stream import Chunk, dumps
from .generation import Choice, Collected, PromptFacts, metrics_of, usage_of
from .job import Event, Job
from .logprobs import (
    CompletionLogprobs,
    CompletionLogprobsPieces,
    Packed,
    Shown,
    Token,
    pack,
    prompt_logprobs,
    token_text,
    unpack_logprob,
)
from .protocol import CompletionRequest
from .thinking import add_marks

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens`; fewer if the context ends first."""


@router.post("/v1/completions", response_model=None, openapi_extra=documented(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue prompts."""
    accepted = await accept(request, CompletionRequest)
    body, serving = accepted.body, accepted.serving
    job = await completion_job(accepted)
    tokenizer = (await serving.llm.requests.processor_of(accepted.lora)).tokenizer
    if body.echo:
        needed(tokenizer, "echo", "echo")
    choices = Completions(tokenizer, body, job.params.n)
    # An echo is tokenized once more, and log-probabilities are many.
    is_long = bool(body.echo) or body.logprobs is not None
    return await accepted.respond(job, "text_completion", choices, choices.answer, in_thread=is_long)


async def completion_job(accepted: Accepted[CompletionRequest]) -> Job:
    """The job that continues the prompts of a request."""
    body, defaults = accepted.body, accepted.defaults
    prompts = await accepted.serving.prompts(
        body.prompts, add_special_tokens=body.add_special_tokens is not False, lora=accepted.lora
    )
    params = _sampling_params(body, defaults)
    await add_marks(accepted.serving, params, accepted.lora)
    return await accepted.prepare(
        prompts,
        params,
        prefix="cmpl",
        beam=beam_params(body, params),
        default_max_tokens=defaults.get("max_tokens", DEFAULT_MAX_TOKENS),
        keeps_output=not _only_scores(body),
        endpoint="/v1/completions",
    )


def _only_scores(body: CompletionRequest) -> bool:
    """True for `max_tokens` 0: the prompt or its log-probabilities are wanted, and no text."""
    return body.max_tokens == 0 and (bool(body.echo) or body.prompt_logprobs is not None)


def _sampling_params(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    changes: dict[str, Any] = {}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None and not body.stream:
        changes["prompt_logprobs"] = body.logprobs
    if _only_scores(body):
        changes["max_tokens"] = 1  # the engine always generates; the token is thrown away
        changes.setdefault("prompt_logprobs", body.prompt_logprobs or 0)  # then the prompt may fill the context
    return body.sampling_params(defaults, **changes)


class Completions:
    """Writer of choices, of the whole answer and of chunks."""

    def __init__(self, tokenizer: Any, body: CompletionRequest, n: int) -> None:
        """`n`: choices of each prompt."""
        self._tokenizer = tokenizer
        self._body = body
        self._n = n
        self._shown: Shown = body.logprob_token_ids or body.logprobs or 0
        self._started: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._plain = body.logprobs is None and not (body.return_token_ids or body.return_draft_status)

    def answer(self, collected: Collected) -> dict[str, Any]:
        """The answer: choices, usage, and the optional fields that were requested."""
        answer: dict[str, Any] = {
            "choices": [
                self.choice(i, choice, collected.prompts[choice.prompt_index])
                for i, choice in enumerate(collected.choices)
            ],
            "usage": usage_of(collected.job),
        }
        if _only_scores(self._body):
            usage = answer["usage"]
            usage.update(completion_tokens=0, total_tokens=usage["prompt_tokens"])
        if self._body.return_metrics:
            answer["metrics"] = metrics_of(collected.job)
        return answer

    def choice(self, index: int, choice: Choice, prompt: PromptFacts) -> dict[str, Any]:
        """A choice of the whole answer."""
        body = self._body
        echo = self._prompt_text(choice.prompt_index, prompt.token_ids) if body.echo else ""
        drop = _only_scores(body) and choice.finish_reason != "abort"
        token_ids = [] if drop else choice.token_ids
        entries = [] if drop else choice.logprobs
        result: dict[str, Any] = {
            "index": index,
            "text": echo if drop else echo + choice.text,
            "logprobs": None,
            "finish_reason": "length" if drop else choice.finish_reason,
            "stop_reason": None if drop else choice.stop_reason,
        }
        if body.logprobs is not None:
            before = self._echoed(choice.prompt_index, prompt) if body.echo else []
            after = self._generated(token_ids, entries)
            result["logprobs"] = CompletionLogprobsPieces(CompletionLogprobs(self._shown), before + after)
        if body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(prompt.logprobs or [])
        if body.return_token_ids:
            result["prompt_token_ids"] = prompt.token_ids
        return result | asked_fields(body, Choice(choice.prompt_index) if drop else choice)

    def _echoed(self, prompt_index: int, prompt: PromptFacts) -> list[Token]:
        """Tokens of the echoed prompt. Tokens that the tokenizer added around a text are not shown."""
        token_ids = prompt.token_ids
        hidden = 0
        text = self._body.prompts[prompt_index]
        if isinstance(text, str) and self._body.add_special_tokens is not False:
            bare = list(self._tokenizer.encode(text, add_special_tokens=False))
            while hidden < len(token_ids) - len(bare) and token_ids[hidden : hidden + len(bare)] != bare:
                hidden += 1
            end = hidden + len(bare)
        else:
            end = len(token_ids)
        entries = prompt.logprobs or [None] * len(token_ids)
        texts = TokenTexts(read_vocabulary(self._tokenizer), skip_special_tokens=False, at_start=True)
        tokens = []
        for i, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
            if i == hidden:
                texts = TokenTexts(read_vocabulary(self._tokenizer), skip_special_tokens=False, at_start=True)
            token, _ = texts.next(token_id, is_last=i == end - 1)
            tokens.append(Token(token_id, None if entry is None else pack(entry), hidden <= i < end, token))
        return tokens

    def _generated(self, token_ids: list[int], entries: Sequence[Packed]) -> list[Token]:
        tokens = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            chosen = unpack_logprob(token_id, entry)
            tokens.append(Token(token_id, entry, chosen.token_bytes != b"", token_text(token_id, chosen)))
        return tokens

    def _prompt_text(self, prompt_index: int, token_ids: list[int]) -> str:
        prompt = self._body.prompts[prompt_index]
        return prompt if isinstance(prompt, str) else read_vocabulary(self._tokenizer).decode(token_ids)

    def choices(self, event: Event) -> list[Chunk]:
        """See ChunkEncoder."""
        chunks: list[Chunk] = []
        for output in event.output.outputs:
            index = event.prompt_index * self._n + output.index
            text = output.text
            first = index not in self._started
            if first:
                self._started.add(index)
                if self._body.echo:
                    text = self._prompt_text(event.prompt_index, event.output.prompt_token_ids) + text
            if not self._plain or output.finish_reason is not None:
                chunks.append(self._full(index, text, output, event.output.prompt_token_ids if first else None))
            elif text:
                chunks.append(f'{{"index":{index},"text":{dumps(text)},"logprobs":null,"finish_reason":null}}')
        return chunks

    def _full(self, index: int, text: str, output: CompletionOutput, prompt: list[int] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }
        if self._body.logprobs is not None and output.token_ids:
            logprobs = self._logprobs.setdefault(index, CompletionLogprobs(self._shown))
            tokens = self._generated(output.token_ids, list(map(pack, output.logprobs or ())))
            choice["logprobs"] = CompletionLogprobsPieces(logprobs, tokens)
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if self._body.return_token_ids and prompt is not None:
            choice["prompt_token_ids"] = prompt
        return choice | asked_fields(self._body, output)
