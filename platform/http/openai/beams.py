"""Beam search over HTTP: `use_beam_search` of completions and chats. `n` is the width."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial

from ...client.text.detokenizer import IncrementalDetokenizer
from ...core.beam_search import BeamSearchParams
from ...core.errors import invalid
from ...core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ...core.sampling_params import SamplingParams
from ..serving_state import Serving
from .job import Job
from .protocol import SamplingFields

_NOT_WITH_BEAMS = """
    stream speculative stop stop_token_ids bad_words min_tokens logit_bias allowed_token_ids presence_penalty
    frequency_penalty return_draft_status logprob_token_ids thinking_token_budget repetition_detection
""".split()
"""Fields that are refused at values that ask for something."""


def beam_params(body: SamplingFields, params: SamplingParams) -> BeamSearchParams | None:
    """Parameters of the search that a body asks for; None if it asks for none. The job has the final `max_tokens`.

    Raises:
        InvalidRequestError: a field that beam search has no use for, or a wrong value.
    """
    if not body.use_beam_search:
        if body.length_penalty is not None and body.length_penalty != 1.0:
            raise invalid("length_penalty", "needs use_beam_search")
        return None
    refused = [name for name in _NOT_WITH_BEAMS if getattr(body, name, None) not in (None, False, 0, "", [], {})]
    refused += [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None]  # 0 asks, too
    if body.repetition_penalty not in (None, 1.0):
        refused.append("repetition_penalty")
    if params.structured_outputs is not None:
        refused.append(params.structured_outputs.source)
    if refused:
        raise invalid(refused[0], "is not available with use_beam_search")
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or 1,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )


async def beam_outputs(serving: Serving, job: Job, index: int) -> AsyncGenerator[RequestOutput]:
    """The one output of a prompt's search, with its `n` sequences."""
    assert job.beam is not None
    prepared, prompt = job.prepared[index], job.prepared[index].prompt.token_ids
    params, tokenizer = prepared.params, prepared.tokenizer
    metrics = RequestMetrics(arrival_time=prepared.arrival_time)
    found = await serving.llm.beam_search(
        prepared.prompt,
        job.beam.with_max_tokens(params.max_tokens or 1),
        prepared.request_id,
        lora_request=prepared.lora,
        on_step=partial(job.searching.__setitem__, index),
        **prepared.options,
    )
    job.searching.pop(index, None)
    metrics.first_token_time = metrics.finished_time = time.monotonic()
    outputs = []
    for number, sequence in enumerate(found.sequences):
        token_ids = sequence.tokens[len(prompt) :]
        text = ""
        if tokenizer is not None:
            detokenizer = IncrementalDetokenizer(tokenizer, params, prompt)
            detokenizer.update(token_ids, ends_with_stop_token=sequence.finish_reason == "stop")
            detokenizer.finish()
            text = detokenizer.text
        outputs.append(CompletionOutput(number, text, token_ids, sequence.cum_logprob, None, sequence.finish_reason))
    yield RequestOutput(prepared.request_id, None, prompt, outputs, True, metrics, lora_request=prepared.lora)
