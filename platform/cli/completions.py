"""Completions that a target writes for `outrider train-draft --generate`: a file with a line for each prompt."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...spec_decode.training.output_files import aside
from ..core.progress import EVERY, Progress, duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...spec_decode.training.options import TrainOptions
    from ..client.llm import LLM
    from ..client.prompts import Prompt
    from ..core.lora_request import LoRARequest
    from ..core.outputs import RequestOutput

_WINDOW = 128
"""Answers over which the speed is taken: the first to end are shorter than most."""


def completed(file: Path, *, mend: bool = False) -> dict[int, dict[str, Any]]:
    """Completions of a file by the number of their prompt; damaged lines are left out.

    Args:
        mend: cut off a half-written last line.

    While answers are written, each line has a `number`, since short answers end first. In a complete file the lines
    are in the order of the prompts.
    """
    if not file.is_file():
        return {}
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    if mend and end < len(data):
        with file.open("r+b") as opened:
            opened.truncate(end)
    found = {}
    for index, line in enumerate(data[:end].splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(number := record.pop("number", index), int):
                found[number] = record
    return found


def put_in_order(file: Path) -> None:
    """Rewrite a complete file in the order of the prompts, without their numbers."""
    found = completed(file)
    text = "".join(json.dumps(found[number]) + "\n" for number in sorted(found))
    if text.encode() != file.read_bytes():
        with aside(file) as written:
            written.write_text(text, encoding="utf-8")


def complete(
    options: TrainOptions,
    llm: LLM,
    lora: LoRARequest | None,
    prompts: Sequence[list[int]],
    file: Path,
    report: Callable[[str], None],
) -> None:
    """Complete the prompts that are not in the file yet. All are queued at once: the engine's batch stays full."""
    from ..core.sampling_params import SamplingParams

    room, done = llm.engine_info.max_model_len, completed(file, mend=True)
    missing = [number for number in range(len(prompts)) if number not in done]
    params = [
        SamplingParams(
            temperature=options.temperature,
            max_tokens=min(options.max_tokens, room - len(prompts[number])),
            seed=None if options.temperature == 0 else options.seed + number,
        )
        for number in missing
    ]
    if missing:
        with (
            _Writer(prompts, missing, file, llm.engine_info.max_num_seqs) as writer,
            Progress(report, _every(options)) as progress,
        ):
            progress.say(f"generating {len(missing)} answers of at most {options.max_tokens} tokens")
            progress.doing(writer.describe)
            given: list[Prompt] = [{"prompt_token_ids": prompts[number]} for number in missing]
            llm.generate(given, params, lora, use_tqdm=options.progress, on_output=writer.add)
    put_in_order(file)


def _every(options: TrainOptions) -> float | None:
    return None if options.progress else EVERY


class _Writer:
    """Writer of each completion as soon as it ends, and an estimate of the time that is left."""

    def __init__(self, prompts: Sequence[list[int]], missing: Sequence[int], file: Path, max_num_seqs: int) -> None:
        self._prompts, self._missing, self._max_num_seqs = prompts, missing, max_num_seqs
        self._out = file.open("a", encoding="utf-8")
        self._ended: deque[float] = deque(maxlen=_WINDOW)
        self._count = self._tokens = 0
        self._began = time.monotonic()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def add(self, index: int, output: RequestOutput) -> None:
        """Write the completion of prompt `missing[index]`."""
        number, completion = self._missing[index], list(output.outputs[0].token_ids)
        line = {"number": number, "prompt_token_ids": self._prompts[number], "completion_token_ids": completion}
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()
        self._count, self._tokens = self._count + 1, self._tokens + len(completion)
        self._ended.append(time.monotonic())

    def describe(self) -> str:
        """A line about the answers that have ended, the speed and the time that is left."""
        seconds = time.monotonic() - self._began
        line = f"generated {self._count} of {len(self._missing)} answers"
        if not self._count:
            return f"{line}, {duration(seconds)} so far"
        line += f", {self._tokens / seconds:,.0f} tokens/s"
        left = len(self._missing) - self._count
        if left <= self._max_num_seqs:  # none waits, and the longest answers end last: no estimate is right
            return f"{line}, the last {left} are being written"
        if self._count <= self._max_num_seqs:  # they began together, and the shortest end first: no estimate either
            return f"{line}, {duration(seconds)} so far"
        window = list(self._ended)
        return f"{line}, about {duration(left * (window[-1] - window[0]) / (len(window) - 1))} left"
