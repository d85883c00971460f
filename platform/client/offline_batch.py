"""Offline generation: a batch of requests, run to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import InvalidUserInputError
from ..core.outputs import RequestOutput
from .llm_engine import LLMEngine
from .output_processor import RequestState
from .prepared import Prepared
from .progress import GenerationProgress


def run_batch(
    engine: LLMEngine,
    requests: Sequence[Prepared],
    use_tqdm: bool | Callable[..., Any] = True,
    on_output: Callable[[int, RequestOutput], None] | None = None,
) -> list[RequestOutput]:
    """Outputs of the requests, in their order; see `LLM.generate`. After an error the others are aborted."""
    if engine.has_unfinished_requests():
        raise InvalidUserInputError("requests of llm_engine are running: step it until they have finished")
    states: list[RequestState] = []
    try:
        for prepared in requests:
            states.append(engine.begin(prepared))  # noqa: PERF401 - those that have begun are aborted
        with GenerationProgress(len(states), use_tqdm) as progress:
            return _run(engine, states, progress, on_output)
    except BaseException:  # KeyboardInterrupt too: the next call must find the engine idle
        engine.abort_states(states)
        raise


def _run(
    engine: LLMEngine,
    states: list[RequestState],
    progress: GenerationProgress,
    on_output: Callable[[int, RequestOutput], None] | None,
) -> list[RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    numbers = {state.request_id: number for number, state in enumerate(states)}
    while len(outputs) < len(states):
        if engine.is_paused() and not engine.engine.has_work():
            raise InvalidUserInputError("generation is paused: call resume_generation() first")
        for state in engine.advance():
            if state.finished:
                output = outputs[state.request_id] = state.take()
                progress.update(state.num_prompt_tokens, sum(len(o.token_ids) for o in output.outputs))
                if on_output is not None:
                    on_output(numbers[state.request_id], output)
    return [outputs[state.request_id] for state in states]
