"""Generation job of a conversation. An API with conversations makes its requests a chat's, and comes through here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...client.prepared import ParsedPrompt
from ...core.errors import InvalidRequestError, PromptTooLongError, invalid
from ...core.lora_request import LoRA
from ...core.model_limits import check_token_ids
from ...core.sampling_params import SamplingParams
from ..body.lenient import ignore
from ..serving_state import Serving
from .answer import Accepted, renamed
from .beams import beam_params
from .job import Job
from .protocol import ChatCompletionRequest
from .thinking import add_marks
from .tools.answers import MakeParser, open_region, parser_maker
from .tools.choice import ToolChoice, parse_tool_choice
from .tools.formats import find_template
from .tools.grammar import answer_constraint
from .tools.parser import AnswerParser, PlainText

PROMPT_END = 16
"""Number of a prompt's last tokens that are searched for the mark of reasoning that a chat template opened."""


class ChatJob(NamedTuple):
    """A conversation's job, and how its answer is read."""

    job: Job
    make_parser: MakeParser | None
    """Maker of the parsers of the answer's choices; None if it is plain text."""

    def parser(self) -> AnswerParser:
        """A parser, also of plain text."""
        return PlainText() if self.make_parser is None else self.make_parser()


class ChatPlan(NamedTuple):
    """A conversation's prompt and parameters, before its constraint is made."""

    choice: ToolChoice
    params: SamplingParams
    prompt: list[int]
    template: dict[str, Any] | None
    """Response template of the model's format; None if answers are plain text."""
    opened: str
    """Part of the prompt that belongs to the answer."""
    max_tokens_field: str
    """Name of the field in the request."""

    @property
    def make_parser(self) -> MakeParser | None:
        """See `ChatJob`."""
        return parser_maker(self.choice, self.template, self.opened)


async def chat_plan(
    accepted: Accepted[Any],
    body: ChatCompletionRequest,
    messages: list[dict[str, Any]],
    *,
    format_field: str = "response_format",
    parses_reasoning: bool = False,
    prompt: list[int] | None = None,
) -> ChatPlan:
    """Plan of a conversation; arguments and errors as of `chat_job`. `prompt`: its token ids, if they are known."""
    serving, defaults = accepted.serving, accepted.defaults
    choice = parse_tool_choice(body, strict=serving.config.strict_fields)
    body.tools = list(choice.tools)
    if choice.is_forced and (body.response_format or {}).get("type", "text") != "text":
        ignore(format_field, strict=serving.config.strict_fields)  # the call's arguments have a form of their own
        body.response_format = None
    max_tokens_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    params = _sampling_params(serving, body, defaults, choice, max_tokens_field)
    if prompt is None:
        prompt = await serving.chat_prompt(messages, body, accepted.lora)
    tokenizer = (await serving.llm.requests.processor_of(accepted.lora)).tokenizer
    parses_reasoning |= serving.config.reasoning_parser is not None
    template = None
    if choice.tools or parses_reasoning:
        template = await _response_template(serving, choice, tokenizer, accepted.lora)
    await add_marks(serving, params, accepted.lora, template)
    if template is not None:
        params.skip_special_tokens = False  # they may be marks of calls and of reasoning
    return ChatPlan(choice, params, prompt, template, _opened(template, tokenizer, prompt), max_tokens_field)


async def chat_job(
    accepted: Accepted[Any],
    body: ChatCompletionRequest,
    messages: list[dict[str, Any]],
    *,
    prefix: str,
    endpoint: str,
    format_field: str = "response_format",
    parses_reasoning: bool = False,
) -> ChatJob:
    """The job that answers a conversation.

    Args:
        body: the request as a chat; its tools become those that may be called.
        messages: in the form that templates read.
        prefix: prefix of the job's id.
        endpoint: route, as the ledger has it.
        format_field: the request's name of the answer's format, which is ignored if a call is forced.
        parses_reasoning: take reasoning out of the answer if the model's format is known, though the server does not
            ask for it.

    Raises:
        OutriderError: a field is wrong, or the conversation is too long; `param` is a chat's field.
    """
    serving = accepted.serving
    plan = await chat_plan(accepted, body, messages, format_field=format_field, parses_reasoning=parses_reasoning)
    params = plan.params
    written = params.structured_outputs, plan.choice, plan.template, serving.llm.tokenizer, plan.opened
    if plan.choice.has_strict:  # long schemas are rewritten in 0.1 s
        params.structured_outputs = await asyncio.to_thread(answer_constraint, *written)
    else:
        params.structured_outputs = answer_constraint(*written)
    check_token_ids("messages", plan.prompt, serving.llm.input_processor.num_ids(accepted.lora))
    try:
        job = await accepted.prepare(
            [ParsedPrompt(plan.prompt, field="messages")],
            params,
            prefix=prefix,
            beam=beam_params(body, params),
            default_max_tokens=accepted.defaults.get("max_tokens"),
            max_tokens_field=plan.max_tokens_field,
            endpoint=endpoint,
        )
    except PromptTooLongError as error:
        raise renamed(error, {"max_tokens": plan.max_tokens_field}) from error
    return ChatJob(job, plan.make_parser)


async def _response_template(
    serving: Serving, choice: ToolChoice, tokenizer: Any, lora: LoRA | None
) -> dict[str, Any] | None:
    """Format of the model or of the adapter's chat template, for an answer that may have calls or reasoning.

    Raises:
        InvalidRequestError: it is unknown how the model writes calls.
    """
    config = serving.config
    name = config.tool_call_parser if choice.tools else config.reasoning_parser
    template = find_template(name, tokenizer, await serving.chat_template(lora) if name is None else None)
    if choice.tools and template is None and not choice.is_forced:
        raise InvalidRequestError(
            "nothing says in which format this model calls tools: start the server with --tool-call-parser NAME, or "
            'give tool_choice "required"',
            param="tools",
        )
    return template


def _opened(template: dict[str, Any] | None, tokenizer: Any, prompt: list[int]) -> str:
    """Part of the prompt that belongs to the answer."""
    if template is None:
        return ""
    return open_region(template, str(tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)))


def _sampling_params(
    serving: Serving,
    body: ChatCompletionRequest,
    defaults: Mapping[str, Any],
    choice: ToolChoice,
    max_tokens_field: str,
) -> SamplingParams:
    limit = serving.llm.info.max_logprobs
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= limit:
        raise invalid("top_logprobs", f"must be in [0, {limit}], got {body.top_logprobs}")
    changes = {
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "logprob_token_ids": body.logprob_token_ids if body.logprobs else None,
        "max_tokens": getattr(body, max_tokens_field),
        "structured_outputs": choice.constraint(),
    }
    try:
        return body.sampling_params(defaults, **changes)
    except InvalidRequestError as error:
        raise renamed(error, {"max_tokens": max_tokens_field}) from error
