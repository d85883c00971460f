"""Small HTTP client of the chat API, for the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from ...core.errors import ErrorInfo, InvalidRequestError, OutriderError, error_from_info
from ...core.text import shorten

# Valid HTTP whose content is something else: not JSON, or JSON of another shape.
_NOT_OURS = (ValueError, LookupError, TypeError, AttributeError)


class UnreachableError(OutriderError):
    """Error when no server answers, or when it goes away in the middle of an answer."""

    type = "UnreachableError"


@dataclass(slots=True)
class AnswerStats:
    """Statistics of an answer; complete once its text has been read to the end."""

    num_tokens: int = 0
    seconds_to_first: float = 0.0
    seconds: float = 0.0
    acceptance_length: float | None = None
    finish_reason: str | None = None

    def describe(self) -> str:
        """One line of text for people."""
        parts = [f"{self.num_tokens} tokens"]
        if self.seconds > 0 and self.num_tokens:
            parts.append(f"{self.num_tokens / self.seconds:.0f} tokens/s")
        parts.append(f"first after {self.seconds_to_first * 1000:.0f} ms")
        if self.acceptance_length is not None:
            parts.append(f"acceptance length {self.acceptance_length:.2f}")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        return " · ".join(parts)


class ChatClient:
    """Client of one server; a context manager."""

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        """`url` may be "host:port", which is http."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self.stats = AnswerStats()
        """Statistics of the latest answer."""
        timeout = httpx.Timeout(10.0, read=None)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequestError(f"argument --url: {shorten(url)!r} is no URL: {error}", param="url") from error
        if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
            self._http.close()
            raise InvalidRequestError(
                f"argument --url: {shorten(url)!r} must be http://host:port, https://host:port or host:port",
                param="url",
            )

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def models(self) -> list[tuple[str, str | None]]:
        """(name, parent) of every model; the parent is None for the base model.

        Raises:
            UnreachableError: no server there.
            OutriderError: the server's error.
        """
        try:
            response = self._http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        _raise_for(response)
        try:
            return [(str(card["id"]), card.get("parent")) for card in response.json()["data"]]
        except _NOT_OURS as error:
            raise self._not_ours() from error

    def stream(self, model: str, messages: list[dict[str, str]], options: dict[str, Any]) -> Iterator[str]:
        """Pieces of the answer's text; fills `stats`. Closing the iterator stops the generation on the server.

        Raises:
            OutriderError: as in `models`; also in the middle of the answer.
        """
        body = {"model": model, "messages": messages, "stream": True, "return_metrics": True}
        body |= {"stream_options": {"include_usage": True}, **options}
        self.stats = stats = AnswerStats()
        started = time.monotonic()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    _raise_for(response)
                for chunk in _events(response):
                    for choice in chunk["choices"]:
                        stats.finish_reason = choice["finish_reason"] or stats.finish_reason
                        text = choice["delta"].get("content")
                        if text:
                            stats.seconds_to_first = stats.seconds_to_first or time.monotonic() - started
                            yield text
                    _read_totals(stats, chunk)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        except OutriderError:
            raise  # some are ValueErrors too
        except _NOT_OURS as error:
            raise self._not_ours() from error
        finally:
            stats.seconds = time.monotonic() - started

    def _not_ours(self) -> UnreachableError:
        return UnreachableError(f"{shorten(self.url)} does not answer as the OpenAI API does; is the URL right?")

    def _unreachable(self, error: Exception) -> UnreachableError:
        reason = str(error) or type(error).__name__
        return UnreachableError(f"cannot reach {shorten(self.url)}: {reason}; is the server running? (outrider serve)")


def _read_totals(stats: AnswerStats, chunk: dict[str, Any]) -> None:
    if chunk.get("usage"):
        stats.num_tokens = chunk["usage"]["completion_tokens"]
    if chunk.get("metrics"):
        stats.acceptance_length = chunk["metrics"]["speculative_decoding"]["acceptance_length"]


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """JSON objects of a stream of server-sent events."""
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise _typed(event["error"])
        yield event


def _typed(error: Any) -> OutriderError:
    if not isinstance(error, dict):
        return OutriderError(str(error))
    info = ErrorInfo(str(error.get("type")), str(error.get("message")), error.get("param"))
    return error_from_info(info)


def _raise_for(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        text = shorten(" ".join(response.text.split()))
        raise OutriderError(f"the server answered {response.status_code}: {text}") from None
    raise _typed(error)
