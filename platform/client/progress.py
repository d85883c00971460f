"""The progress bar of offline generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm


class GenerationProgress:
    """Counts finished requests, with the speed so far in prompt and output tokens a second."""

    def __init__(self, num_requests: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        if use_tqdm:
            make_bar = tqdm if isinstance(use_tqdm, bool) else use_tqdm
            self._bar = make_bar(total=num_requests, desc="Processed prompts", dynamic_ncols=True)
        self._started = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def update(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_prompt_tokens / seconds:.2f} toks/s, "
            f"output: {self._num_output_tokens / seconds:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
