"""Answers to the requests of a file, from the server's application in this process.

    line -> Request, checked -> the application (ASGI) -> line with the answer, or with the error

Validation, defaults and errors are the server's. A line is written as soon as its answer is there, so the order is that
of the answers; `custom_id` says which is which.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from ..core.config import EngineArgs
from ..core.errors import InvalidRequestError, OutriderError
from ..core.logs import set_up_logging
from ..core.text import shorten
from .server import Service
from .server_config import ServerConfig

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/classify",
    "/v1/responses",
    "/v1/messages",
)
MAX_TRIES = 8
"""Tries of a request that the server refuses for a time: its queue is full, or the engine starts again."""


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Options of a run."""

    input_file: str
    output_file: str
    max_concurrency: int | None = None
    """Requests that are answered at once; None: as many sequences as the engine runs."""


class Request(NamedTuple):
    """A line of the input."""

    custom_id: Any
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """A line is no request."""

    def __init__(self, message: str, custom_id: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.custom_id = custom_id


def run_batch(files: BatchFiles, args: EngineArgs, config: ServerConfig) -> int:
    """Answer all requests; returns the exit status: 1 when some have no good answer.

    Raises:
        OutriderError: a file cannot be opened, or the engine does not start.
    """
    set_up_logging(config.log_level.upper(), config.log_format, "batch")
    with ExitStack() as opened:
        lines, output = _open(files, opened)
        # All that keeps strangers out has no use here.
        config = replace(config, api_keys=(), admin_api_keys=(), database=None)
        counts = asyncio.run(_run(files, lines, output, args, config))
    failed = counts.total - counts.answered
    print(f"{counts.total} requests: {counts.answered} answered, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


def _open(files: BatchFiles, opened: ExitStack) -> tuple[IO[bytes], IO[str]]:
    """Both files, before the model is loaded."""
    try:
        lines = opened.enter_context(Path(files.input_file).expanduser().open("rb"))
    except OSError as error:
        raise InvalidRequestError(f"cannot read {files.input_file}: {error.strerror}", param="input_file") from error
    output = Path(files.output_file).expanduser()
    if output.exists() and output.samefile(files.input_file):
        raise InvalidRequestError("the output is the input", param="output_file")
    try:
        return lines, opened.enter_context(output.open("w", encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"cannot write {files.output_file}: {error.strerror}", param="output_file") from error


async def _run(files: BatchFiles, lines: IO[bytes], output: IO[str], args: EngineArgs, config: ServerConfig) -> _Batch:
    import httpx

    service = Service(args, config)
    await service.start()
    try:
        transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
            batch = _Batch(client, output)
            await batch.run(lines, files.max_concurrency or max(1, service.llm.info.max_num_seqs))
        return batch
    finally:
        await service.close()


class _Batch:
    """One run over a file."""

    def __init__(self, client: httpx.AsyncClient, output: IO[str]) -> None:
        self.total = self.answered = 0
        self._client = client
        self._output = output
        self._seen: set[str] = set()  # custom ids

    async def run(self, lines: IO[bytes], max_concurrency: int) -> None:
        """Answer each line, so many at once."""
        places = asyncio.Semaphore(max_concurrency)
        with tqdm(total=_count(lines), unit="req", disable=not sys.stderr.isatty()) as progress:

            async def answer(number: int, line: bytes) -> None:
                try:
                    self._write(await self._answer(number, line))
                finally:
                    progress.update()
                    places.release()

            async with asyncio.TaskGroup() as tasks:
                for number, line in _numbered(lines):
                    await places.acquire()  # no more lines are read than are answered
                    tasks.create_task(answer(number, line))

    def _write(self, answer: dict[str, Any]) -> None:
        self.total += 1
        self._output.write(json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace").decode() + "\n")
        self._output.flush()

    async def _answer(self, number: int, line: bytes) -> dict[str, Any]:
        """The output's line for one of the input's."""
        result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None}
        try:
            request = self._request(line)
            result["custom_id"] = request.custom_id
            response = await self._send(request)
            body = response.json()
        except LineError as error:
            message = f"line {number}: {error.message}"
            return result | {
                "custom_id": error.custom_id,
                "error": {"code": "invalid_request", "message": message},
            }
        except Exception as error:  # one request's: the others go on
            logger.exception("line %d has no answer", number)
            message = error.message if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
            return result | {"error": {"code": "server_error", "message": f"line {number}: {shorten(message)}"}}
        self.answered += response.is_success
        request_id = response.headers.get("x-request-id", "")
        answer = {"status_code": response.status_code, "request_id": request_id, "body": body}
        return result | {"response": answer, "error": None}

    async def _send(self, request: Request) -> httpx.Response:
        for _ in range(MAX_TRIES - 1):
            response = await self._post(request)
            if response.status_code not in (503, 529):
                return response
            await asyncio.sleep(float(response.headers.get("retry-after", 1)))
        return await self._post(request)

    async def _post(self, request: Request) -> httpx.Response:
        # As ASCII, with NaN: the server says what is wrong with a body, not the client.
        body = json.dumps(request.body).encode()
        return await self._client.post(request.url, content=body, headers={"content-type": "application/json"})

    def _request(self, line: bytes) -> Request:
        """The request of a line.

        Raises:
            LineError: it is none.
        """
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LineError(f"not valid JSON: {shorten(str(error))}") from error
        if not isinstance(content, dict):
            raise LineError("must be a JSON object")
        custom_id = content.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise LineError("custom_id must be a string that is not empty", custom_id)
        if custom_id in self._seen:
            raise LineError(f"custom_id {shorten(custom_id)!r} is that of an earlier line", custom_id)
        self._seen.add(custom_id)
        if content.get("method", "POST") != "POST":
            raise LineError("method must be POST", custom_id)
        url, body = content.get("url"), content.get("body")
        if url not in URLS:
            raise LineError(f"url must be one of {', '.join(URLS)}; got {shorten(repr(url))}", custom_id)
        if not isinstance(body, dict):
            raise LineError("body must be an object", custom_id)
        if body.get("stream"):
            raise LineError("body.stream: a file has no streams", custom_id)
        return Request(custom_id, url, body)


def _numbered(lines: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without empty ones."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _count(lines: IO[bytes]) -> int | None:
    """Number of lines that are not empty; None where the file can be read only once."""
    if not lines.seekable():
        return None
    count = sum(1 for _ in _numbered(lines))
    lines.seek(0)
    return count
