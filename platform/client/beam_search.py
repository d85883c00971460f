"""Beam search on top of `generate`: each step asks for one token of every beam.

The prefix cache shares the KV of whole blocks among beams and steps, so that a step computes for each beam at most a
block of tokens. Without prefix caching it computes everything again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..core.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from ..core.errors import RequestAbortedError, invalid
from ..core.messages import EngineInfo, EngineRequest
from ..core.outputs import Logprob, RequestOutput
from ..core.sampling_params import SamplingParams, quote_for_error
from ..core.tasks import run_all
from .adapters.lora_argument import AnyLoRA, lora_of_each
from .input_processor import take_options
from .prepared import Prepared, RequestOptions
from .progress import GenerationProgress
from .prompts import Prompt, as_prompts

if TYPE_CHECKING:
    from .llm import LLM


class BeamSearch:
    """The search for one prompt.

    A step extends each beam by each of its `2 * beam_width` most likely tokens. An extension by an end token is
    complete. The `beam_width` best of the others are the next beams. In the end the best of both are the result.
    """

    def __init__(self, request: EngineRequest, params: BeamSearchParams) -> None:
        """`request` is the prompt with its limits checked."""
        self.request = request
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(request.eos_token_ids)
        self._num_left = params.max_tokens
        self._beams = [BeamSearchSequence(request.prompt_token_ids, [], request.lora)]
        self._completed: list[BeamSearchSequence] = []

    def prompts(self) -> list[Prompt]:
        """The beams whose next tokens are wanted; empty when the search has ended."""
        if self._num_left == 0 or self._is_decided():
            return []
        salt = self.request.cache_salt
        return [{"prompt_token_ids": beam.tokens, "cache_salt": salt} for beam in self._beams]

    def extend(self, candidates: Sequence[dict[int, Logprob]]) -> None:
        """Take the most likely tokens after each of the beams."""
        extended: list[BeamSearchSequence] = []
        for beam, tokens in zip(self._beams, candidates, strict=True):
            for token_id, logprob in tokens.items():
                longer = replace(
                    beam,
                    tokens=[*beam.tokens, token_id],
                    logprobs=[*beam.logprobs, tokens],
                    cum_logprob=beam.cum_logprob + logprob.logprob,
                    finish_reason="stop" if token_id in self._ends else None,
                )
                (extended if longer.finish_reason is None else self._completed).append(longer)
        self._beams = sorted(extended, key=self._score, reverse=True)[: self._params.beam_width]
        self._num_left -= 1

    def result(self, decode: Callable[[list[int]], str]) -> BeamSearchOutput:
        """The best sequences."""
        best = self._best()
        for sequence in best:
            sequence.text = decode(self.shown_tokens(sequence))
        return BeamSearchOutput(best)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the result has if the search ends here, the prompt's not counted."""
        return sum(len(sequence.tokens) - len(self.request.prompt_token_ids) for sequence in self._best())

    def _best(self) -> list[BeamSearchSequence]:
        unfinished = [replace(beam, finish_reason="length") for beam in self._beams]
        return sorted([*self._completed, *unfinished], key=self._score, reverse=True)[: self._params.beam_width]

    def shown_tokens(self, sequence: BeamSearchSequence) -> list[int]:
        """The tokens of a sequence that its text shows."""
        hides_end = sequence.finish_reason == "stop" and not self._params.include_stop_str_in_output
        return sequence.tokens[:-1] if hides_end else sequence.tokens

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return self._scored(sequence.cum_logprob, length)

    def _scored(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _is_decided(self) -> bool:
        """True when no beam can get better than the `beam_width` best complete sequences. A log-probability only falls;
        the length that is best for it is the longest, or the present one if the penalty is negative."""
        width, penalty = self._params.beam_width, self._params.length_penalty
        if len(self._completed) < width:
            return not self._beams
        worst = sorted(map(self._score, self._completed), reverse=True)[width - 1]
        further = self._num_left if penalty > 0 else 0
        return all(self._scored(beam.cum_logprob, len(beam.tokens) + further) <= worst for beam in self._beams)


def step_params(params: BeamSearchParams, info: EngineInfo) -> SamplingParams:
    """Parameters with which a prompt is checked for its search.

    Raises:
        InvalidRequestError: the engine gives too few log-probabilities.
    """
    if not isinstance(params, BeamSearchParams):
        raise invalid("params", f"must be BeamSearchParams, got {quote_for_error(params)}")
    if 2 * params.beam_width > info.max_logprobs:
        raise invalid(
            "beam_width",
            f"{params.beam_width} needs {2 * params.beam_width} log-probabilities a token, and the engine gives "
            f"{info.max_logprobs} (max_logprobs)",
        )
    return _STEP.clone(max_tokens=params.max_tokens, logprobs=min(2 * params.beam_width, info.vocab_size))


_STEP = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, speculative=False, ignore_eos=True)
"""Parameters of a step: one token, and the most likely ones at its position."""


def _candidates(output: RequestOutput) -> dict[int, Logprob]:
    [completion] = output.outputs
    if not completion.logprobs:
        raise RequestAbortedError("the request was aborted before it had a result; send it again")
    return completion.logprobs[0]


def _decoder(prepared: Prepared) -> Callable[[list[int]], str]:
    if prepared.tokenizer is None:
        return lambda token_ids: ""
    return cast(Callable[[list[int]], str], prepared.tokenizer.decode)


def search_all(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    params: BeamSearchParams,
    lora_request: AnyLoRA | Sequence[AnyLoRA | None] | None,
    use_tqdm: bool | Callable[..., Any],
    concurrency_limit: int | None,
    options: dict[str, Any],
) -> list[BeamSearchOutput]:
    """The work of `LLM.beam_search`, by `LLM.generate`."""
    take_options("LLM.beam_search()", options)
    engine = llm.llm_engine
    engine.check_open()
    checked = step_params(params, engine.engine_info)
    batch = as_prompts(prompts)
    works = [
        engine.prepare(prompt, checked, request_id="beam", lora_request=lora, **cast(RequestOptions, options))
        for prompt, lora in zip(batch, lora_of_each(lora_request, len(batch)), strict=True)
    ]
    size = concurrency_limit if concurrency_limit is not None else max(1, len(works))
    if size < 1:
        raise invalid("concurrency_limit", f"must be at least 1, got {size}")
    results: list[BeamSearchOutput] = []
    with GenerationProgress(len(works), use_tqdm) as progress:
        for start in range(0, len(works), size):
            part = works[start : start + size]
            searches = [BeamSearch(work.sequences()[0], params) for work in part]
            _search_part(llm, searches, checked.clone(max_tokens=1), options)
            for search, work in zip(searches, part, strict=True):
                results.append(search.result(_decoder(work)))
                progress.update(len(search.request.prompt_token_ids), params.beam_width * params.max_tokens)
    return results


def _search_part(llm: LLM, searches: list[BeamSearch], step: SamplingParams, options: dict[str, Any]) -> None:
    while work := [(search, prompts) for search in searches if (prompts := search.prompts())]:
        prompts = [prompt for _, several in work for prompt in several]
        loras = [search.request.lora for search, several in work for _ in several]
        outputs = iter(llm.generate(prompts, step, loras, use_tqdm=False, **options))
        for search, several in work:
            search.extend([_candidates(next(outputs)) for _ in several])


async def search_async(
    prepared: Prepared,
    params: BeamSearchParams,
    generate: Callable[[int, Prompt], Awaitable[RequestOutput]],
    on_step: Callable[[int], None] | None,
) -> BeamSearchOutput:
    """The work of `AsyncLLM.beam_search`. `generate` gets the index of a beam, and the beam."""
    search = BeamSearch(prepared.sequences()[0], params)

    async def candidates(index: int, beam: Prompt) -> dict[int, Logprob]:
        return _candidates(await generate(index, beam))

    while prompts := search.prompts():
        search.extend(await run_all([candidates(index, beam) for index, beam in enumerate(prompts)]))
        if on_step is not None:
            on_step(search.num_output_tokens)
    return search.result(_decoder(prepared))
