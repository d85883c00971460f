"""Common parts of `latency` and `throughput`: an `LLM` with the options of `outrider serve`, and its requests."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .....models.demo import DEMO_MODEL_NAME, demo_adapters
from ....core.config import EngineArgs, check_args
from ....core.errors import InvalidRequestError, OutriderError, PromptTooLongError
from ....core.lora_request import LoRARequest
from ....core.messages import SpeculationCounts
from ....core.outputs import RequestOutput
from ....core.sampling_params import SamplingParams
from ....core.speculative_config import parse_speculative
from ...options.engine import given_options
from ..request_figures import RequestRecord
from .datasets import Sample


def engine_args(options: argparse.Namespace, **defaults: Any) -> EngineArgs:
    """Options of the engine: the command line's, else `defaults`, else the demo's for the demo.

    Raises:
        InvalidRequestError: an option is wrong whatever the model; `param` names it.
    """
    from ....client.demo_defaults import apply_demo_defaults

    given = given_options(options)
    if options.no_speculation:
        if given.get("speculative_config") is not None:
            raise InvalidRequestError("not allowed together with --speculative-config", param="no_speculation")
        given["speculative_config"] = {"method": "off"}
    if options.lora and given.setdefault("enable_lora", True) is False:
        raise InvalidRequestError("needs LoRA, which --no-enable-lora switches off", param="lora")
    model = None if options.model == DEMO_MODEL_NAME else options.model
    args, _ = apply_demo_defaults(EngineArgs(model=model, **(defaults | given)), given)
    check_args(args)
    parse_speculative(args.speculative_config)
    return args


def adapters(options: argparse.Namespace) -> dict[str, LoRARequest]:
    """Adapters of --lora, by name.

    Raises:
        InvalidRequestError: a name is there twice, or has no path and is not one of the demo's.
    """
    found: dict[str, LoRARequest] = {}
    known = demo_adapters() if options.model in (None, DEMO_MODEL_NAME) else {}
    for name, path in options.lora or ():
        if name in found:
            raise InvalidRequestError(f"there are two adapters called {name!r}", param="lora")
        if path is None and name not in known:
            raise InvalidRequestError(f"the adapter {name!r} needs a path: NAME=PATH", param="lora")
        found[name] = LoRARequest(name, path=path or str(known[name]))
    return found


def lora_of(sample: Sample, loras: Mapping[str, LoRARequest]) -> LoRARequest | None:
    """The adapter that a sample asks for; InvalidRequestError for one that --lora does not give."""
    if sample.adapter is None:
        return None
    if sample.adapter not in loras:
        raise InvalidRequestError(
            f"a prompt names the adapter {sample.adapter!r}; give it with --lora", param="dataset_path"
        )
    return loras[sample.adapter]


def check_lengths(samples: Sequence[Sample], max_model_len: int) -> None:
    """Raise PromptTooLongError for a request that exceeds the model's limit."""
    for sample in samples:
        total = (sample.num_prompt_tokens or 0) + sample.max_tokens
        if total > max_model_len:
            raise PromptTooLongError(
                f"a prompt of {sample.num_prompt_tokens} tokens with {sample.max_tokens} more exceeds the model's "
                f"limit of {max_model_len}",
                param="input_len",
            )


def sampling_params(samples: Sequence[Sample], temperature: float, ignore_eos: bool, seed: int) -> list[SamplingParams]:
    """Sampling parameters of each sample, with a different seed for each."""
    return [
        SamplingParams(max_tokens=sample.max_tokens, temperature=temperature, ignore_eos=ignore_eos, seed=seed + index)
        for index, sample in enumerate(samples)
    ]


def prompt_of(sample: Sample, tokenizer: Any) -> Any:
    """A sample's prompt for `LLM.generate`."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    if sample.is_ids:
        return {"prompt_token_ids": sample.prompt}
    from ..prompt_files import encode

    try:
        return {"prompt_token_ids": encode(tokenizer, sample.prompt)}
    except OutriderError as error:
        raise type(error)(error.message, param="dataset_path") from None


def record_of(index: int, output: RequestOutput, adapter: str | None) -> RequestRecord:
    """Record of a request. Offline only the times of the first and the last token are known."""
    metrics, completion = output.metrics, output.outputs[0]
    assert metrics is not None
    assert metrics.finished_time is not None
    first = metrics.first_token_time
    return RequestRecord(
        index=index,
        started=metrics.arrival_time,
        arrivals=[] if first is None else [first, metrics.finished_time],
        ended=metrics.finished_time,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=len(completion.token_ids),
        adapter=adapter,
        finish_reason=completion.finish_reason,
        streamed=False,
    )


def speculation_of(outputs: Sequence[RequestOutput]) -> SpeculationCounts:
    """Sum of the counts of all requests."""
    total = SpeculationCounts()
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        total.add(
            SpeculationCounts(
                metrics.num_drafts,
                metrics.num_draft_tokens,
                metrics.num_accepted_tokens,
                metrics.accepted_per_pos,
                metrics.steps_by_k,
            )
        )
    return total


def describe(benchmark: str, options: argparse.Namespace, args: EngineArgs, info: Any) -> dict[str, Any]:
    """The head of a report."""
    from ..machine import describe_machine, describe_model
    from .load_options import arguments
    from .vllm_tables import has_random_weights, weight_labels

    folder = Path(info.model)
    speculative = parse_speculative(args.speculative_config)
    rates = speculative.synthetic_acceptance_rates if speculative is not None else None
    name = DEMO_MODEL_NAME if args.model is None else "/".join(Path(args.model).parts[-2:])
    return {
        "benchmark": benchmark,
        "labels": weight_labels(args.load_format == "dummy" or has_random_weights(folder), rates),
        "machine": describe_machine(),
        "model": {"name": name, **describe_model(info, folder), "speculation": info.speculation},
        "arguments": arguments(options),
    }
