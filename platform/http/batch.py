"""Answers to the requests of a file, from the server's application in this process.

Validation, defaults and errors are the server's. A line is written as soon as its answer is there, so the order is that
of the answers; `custom_id` says which is which.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from tqdm import tqdm

from ..core.config import EngineArgs
from ..core.errors import InvalidRequestError, OutriderError
from ..core.logs import set_up_logging
from ..core.progress import EVERY, Progress, Stopwatch
from ..core.text import shorten
from .batches.lines import LINE_OVERHEAD, CustomIds, Line, LineError, LineParser, numbered
from .batches.sender import MAX_TRIES, Sender, answer_line, error_line, new_line_id
from .server import Service
from .server_config import ServerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Options of a run."""

    input_file: str
    output_file: str
    max_concurrency: int | None = None
    """Requests that are answered at once; None: as many sequences as the engine runs."""


def run_batch(files: BatchFiles, args: EngineArgs, config: ServerConfig) -> int:
    """Answer all requests; returns the exit status: 1 when some have no good answer.

    Raises:
        OutriderError: a file cannot be opened, or the engine does not start.
    """
    set_up_logging(config.log_level.upper(), config.log_format, "batch")
    with ExitStack() as opened:
        lines, output = _open(files, opened)
        # All that keeps strangers out has no use here.
        config = replace(config, api_keys=(), admin_api_keys=(), database=None, batch_dir=None)
        counts = asyncio.run(_run(files, lines, output, args, config))
    failed = counts.total - counts.answered
    print(f"{counts.total} requests: {counts.answered} answered, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


def _open(files: BatchFiles, opened: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Both files, before the model is loaded."""
    try:
        lines = opened.enter_context(Path(files.input_file).expanduser().open("rb"))
    except OSError as error:
        raise InvalidRequestError(f"cannot read {files.input_file}: {error.strerror}", param="input_file") from error
    output = Path(files.output_file).expanduser()
    if output.exists() and output.samefile(files.input_file):
        raise InvalidRequestError("the output is the input", param="output_file")
    try:
        return lines, opened.enter_context(output.open("wb"))
    except OSError as error:
        raise InvalidRequestError(f"cannot write {files.output_file}: {error.strerror}", param="output_file") from error


async def _run(
    files: BatchFiles, lines: IO[bytes], output: IO[bytes], args: EngineArgs, config: ServerConfig
) -> _Batch:
    service = Service(args, config)
    await service.start()
    try:
        async with Sender(service.app, max_waits=MAX_TRIES) as sender:
            batch = _Batch(sender, output, config.max_body_bytes + LINE_OVERHEAD)
            await batch.run(lines, files.max_concurrency or max(1, service.llm.info.max_num_seqs))
        return batch
    finally:
        await service.close()


class _Batch:
    """One run over a file."""

    def __init__(self, sender: Sender, output: IO[bytes], max_line_bytes: int) -> None:
        self.total = self.answered = 0
        self._sender = sender
        self._output = output
        self._parser = LineParser(max_bytes=max_line_bytes, is_lenient=True)
        self._seen = CustomIds()

    async def run(self, lines: IO[bytes], max_concurrency: int) -> None:
        """Answer each line, up to `max_concurrency` at once."""
        slots = asyncio.Semaphore(max_concurrency)
        count, on_terminal, watch = self._count(lines), sys.stderr.isatty(), Stopwatch()
        of = "" if count is None else f" of {count}"
        with (
            tqdm(total=count, unit="req", disable=not on_terminal) as progress,
            Progress(_say, None if on_terminal else EVERY) as life,
        ):
            life.doing(lambda: f"{self.total}{of} requests done, after {watch}")

            async def answer(line: Line) -> None:
                try:
                    self._write(await self._answer(line))
                finally:
                    progress.update()
                    slots.release()

            async with asyncio.TaskGroup() as tasks:
                for line in numbered(lines, self._parser.max_bytes):
                    await slots.acquire()  # no more lines are read than are answered
                    tasks.create_task(answer(line))

    def _count(self, lines: IO[bytes]) -> int | None:
        """Number of lines that are not empty; None if the file can be read only once."""
        if not lines.seekable():
            return None
        count = sum(1 for _ in numbered(lines, self._parser.max_bytes))
        lines.seek(0)
        return count

    def _write(self, answer: bytes) -> None:
        self.total += 1
        self._output.write(answer)
        self._output.flush()

    async def _answer(self, line: Line) -> bytes:
        """The output's line for one of the input's."""
        line_id, custom_id = new_line_id(), None
        try:
            request = self._parser.parse(line)
            custom_id = request.custom_id
            if not self._seen.add(custom_id):
                message = f"custom_id {shorten(custom_id)!r} is that of an earlier line"
                raise LineError(message, "duplicate_custom_id", "custom_id", custom_id)
            response = await self._sender.send(request, line_id)
            written = answer_line(line_id, custom_id, response)
        except LineError as error:
            message = f"line {line.number}: {error.message}"
            return error_line(line_id, error.custom_id, "invalid_request", message)
        except Exception as error:  # one request's: the others continue
            logger.exception("line %d has no answer", line.number)
            message = error.message if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
            return error_line(line_id, custom_id, "server_error", f"line {line.number}: {message}")
        self.answered += response.is_success
        return written


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
