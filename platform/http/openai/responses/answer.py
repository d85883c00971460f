"""The response object, and the stream of events that makes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ....core.errors import OutriderError, OverloadedError, RateLimitError
from ...protect.error_responses import error_content
from ..answer import Accepted
from ..chat_job import ChatJob
from ..event_stream import dumps
from ..generation import Collected
from ..job import Event
from .conversation import Item
from .output import OutputItems, StreamEvent
from .protocol import ResponsesRequest
from .store import ResponseStore, Stored


class ResponseAnswer:
    """One response while it is made. It is a `StreamWriter` too."""

    def __init__(self, accepted: Accepted[ResponsesRequest], chat: ChatJob, items: list[Item]) -> None:
        """Begin a response.

        Args:
            items: conversation before the answer.
        """
        self._accepted = accepted
        self._items = items
        self._head = _head(accepted, chat)
        self._output = OutputItems(chat.parser())
        self._counts = chat.job.counts
        self._reason: str | None = None
        self._num_events = 0
        self._has_ended = False
        self._store: ResponseStore = accepted.serving.responses
        self._tenant = chat.job.principal.tenant

    async def whole(self, collected: Collected) -> dict[str, Any]:
        """The response object of a whole answer."""
        [choice] = collected.choices
        self._reason = choice.finish_reason
        self._output.feed(choice.text)
        self._output.finish(self._item_status)
        return self._keep(await self._ended())

    # --- a stream ---

    def events(self, event: Event) -> Iterator[str]:
        """See StreamWriter."""
        if not self._num_events:
            begun = self._keep(self._response("in_progress"))
            for kind in ("created", "in_progress"):
                yield self._written({"type": f"response.{kind}", "response": begun})
        [output] = event.output.outputs
        if output.finish_reason is not None:
            self._reason = output.finish_reason
        yield from map(self._written, self._output.feed(output.text))

    async def last(self) -> Iterator[str]:
        """See StreamWriter."""
        events = self._output.finish(self._item_status)
        response = self._update(await self._ended())
        kind = {"completed": "completed", "failed": "failed"}.get(response["status"], "incomplete")
        return map(self._written, [*events, {"type": f"response.{kind}", "response": response}])

    def error(self, error: Exception) -> str:
        """See StreamWriter."""
        self._output.close("incomplete")
        response = self._update(self._response("failed", error=_error(error)))
        return self._written({"type": "response.failed", "response": response})

    def close(self) -> None:
        """See StreamWriter: the stored response of a client that has gone ends too."""
        if not self._has_ended:
            self._output.close("incomplete")
            self._update(self._response("cancelled"))

    def _written(self, event: StreamEvent) -> str:
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        return f"event: {event['type']}\ndata: {dumps(numbered)}\n\n"

    # --- the response object ---

    @property
    def _item_status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    async def _ended(self) -> dict[str, Any]:
        """The response when its text has ended."""
        usage = await self._usage()
        if self._reason == "length":
            return self._response("incomplete", usage=usage, incomplete_details={"reason": "max_output_tokens"})
        if self._reason == "abort":
            return self._response("cancelled", usage=usage)
        return self._response("completed", usage=usage, completed_at=int(time.time()))

    def _response(self, status: str, **changes: Any) -> dict[str, Any]:
        return self._head | {"status": status, "output": list(self._output.items), **changes}

    async def _usage(self) -> dict[str, Any]:
        counts, reasoning = self._counts, self._output.reasoning
        num_reasoning = 0
        if reasoning:  # counted in its text: a step's tokens may be of it and of what follows
            tokens = await self._accepted.serving.encode(reasoning, add_special_tokens=False, lora=self._accepted.lora)
            num_reasoning = min(len(tokens), counts.output_tokens)
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counts.output_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": counts.prompt_tokens + counts.output_tokens,
        }

    def _keep(self, response: dict[str, Any]) -> dict[str, Any]:
        if self._accepted.body.is_stored:
            self._store.put(self._tenant, Stored(response, self._items))
        return response

    def _update(self, response: dict[str, Any]) -> dict[str, Any]:
        self._has_ended = True
        self._store.update(self._tenant, response)
        return response


def _error(error: Exception) -> dict[str, Any]:
    """The response's `error`, which has codes of its own."""
    is_limit = isinstance(error, OverloadedError | RateLimitError) and isinstance(error, OutriderError)
    return {
        "code": "rate_limit_exceeded" if is_limit else "server_error",
        "message": error_content(error)["error"]["message"],
    }


def _head(accepted: Accepted[ResponsesRequest], chat: ChatJob) -> dict[str, Any]:
    """Fields that do not change while the response is made, most of them the request's."""
    body, job = accepted.body, chat.job
    form = (body.text.format if body.text is not None else None) or {"type": "text"}
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "id": job.request_id,
        "object": "response",
        "created_at": int(job.arrival.wall),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": accepted.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "store": body.is_stored,
        "temperature": job.params.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": job.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
