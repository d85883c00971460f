"""`outrider bench throughput`, and its common parts with `latency`: an `LLM` with the options of `serve`, requests."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....client.llm import LLM
from ....core.config import EngineArgs
from ....core.errors import InvalidRequestError, PromptTooLongError
from ....core.lora_request import LoRARequest
from ....core.outputs import RequestOutput
from ....core.sampling_params import SamplingParams
from ....core.speculative_config import parse_speculative
from ...options.engine_options import given_options, resolve_engine
from ..bench_options import Result, given_adapters
from ..machine import describe_machine, describe_model, has_random_weights, labels
from ..prompt_files import encode
from ..request_figures import RequestRecord, figures
from .datasets import Sample, assign_adapters, make_samples
from .serving_commands import arguments
from .serving_report import draw_latencies, format_table


def engine_args(options: argparse.Namespace, **defaults: Any) -> EngineArgs:
    """Options of the engine: the command line's, else `defaults`, else the demo's for the demo.

    Raises:
        InvalidRequestError: an option is wrong whatever the model; `param` names it.
    """
    given = defaults | given_options(options)
    if options.lora and given.setdefault("enable_lora", True) is False:
        raise InvalidRequestError("needs LoRA, which --no-enable-lora switches off", param="lora")
    return resolve_engine(options, options.model, given)[0]


def adapters(options: argparse.Namespace) -> dict[str, LoRARequest]:
    """Adapters of --lora, by name."""
    return {name: LoRARequest(name, path=path) for name, path in given_adapters(options).items()}


class Requests:
    """Samples as arguments of `LLM.generate`."""

    def __init__(
        self,
        llm: LLM,
        samples: Sequence[Sample],
        loras: Mapping[str, LoRARequest],
        options: argparse.Namespace,
        seed: int,
    ) -> None:
        """Load the adapters. Each request has a seed of its own.

        Raises:
            PromptTooLongError: a request exceeds the model's limit.
            InvalidRequestError: a sample names an adapter that is not there, or is no prompt.
        """
        limit = llm.engine_info.max_model_len
        for sample in samples:
            if (sample.num_prompt_tokens or 0) + sample.max_tokens > limit:
                raise PromptTooLongError(
                    f"a prompt of {sample.num_prompt_tokens} tokens with {sample.max_tokens} more exceeds the model's "
                    f"limit of {limit}",
                    param="input_len",
                )
            if sample.adapter is not None and sample.adapter not in loras:
                raise InvalidRequestError(
                    f"a prompt names the adapter {sample.adapter!r}; give it with --lora", param="dataset_path"
                )
        for lora in loras.values():
            llm.load_lora_adapter(lora)
        tokenizer = llm.get_tokenizer()
        self.samples = samples
        self.prompts = [_prompt_of(sample, tokenizer) for sample in samples]
        self.loras = [None if sample.adapter is None else loras[sample.adapter] for sample in samples]
        self.params = [
            SamplingParams(
                max_tokens=sample.max_tokens,
                temperature=options.temperature,
                ignore_eos=options.ignore_eos,
                seed=seed + index,
            )
            for index, sample in enumerate(samples)
        ]

    def records(self, outputs: Sequence[RequestOutput], first: int = 0) -> list[RequestRecord]:
        """A record of each output, numbered from `first` on."""
        return [
            _record(first + index, output, sample.adapter)
            for index, (output, sample) in enumerate(zip(outputs, self.samples, strict=True))
        ]


def _prompt_of(sample: Sample, tokenizer: Any) -> Any:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return {"prompt_token_ids": sample.prompt if sample.is_ids else encode(tokenizer, sample.prompt, "dataset_path")}


def _record(index: int, output: RequestOutput, adapter: str | None) -> RequestRecord:
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
        speculation=metrics,
    )


def offline_result(
    benchmark: str,
    options: argparse.Namespace,
    args: EngineArgs,
    info: Any,
    figures: dict[str, Any],
    records: Sequence[RequestRecord],
    **more: Any,
) -> Result:
    """The result with its head; `more` are further fields of the report."""
    folder = Path(info.model)
    speculative = parse_speculative(args.speculative_config)
    rates = speculative.synthetic_acceptance_rates if speculative is not None else None
    report: dict[str, Any] = {
        "benchmark": benchmark,
        "labels": labels(random_weights=args.load_format == "dummy" or has_random_weights(folder), synthetic=rates),
        "machine": describe_machine(),
        "model": {**describe_model(options.model, info), "speculation": info.speculation},
        "arguments": arguments(options),
        "figures": figures,
        **more,
    }
    if options.save_detailed:
        origin = min(record.started for record in records)
        report["requests"] = [record.as_dict(origin) for record in records]
    return Result(report, format_table(report), lambda file: draw_latencies(report, records, file))


def measure_throughput(options: argparse.Namespace) -> Result:
    """Measure with the options of the command.

    Raises:
        OutriderError: whatever is wrong with options, model or adapters.
    """
    args, loras = engine_args(options), adapters(options)
    with LLM.from_engine_args(args) as llm:
        info = llm.engine_info
        samples = make_samples(options, llm.get_tokenizer(), args.seed)
        assign_adapters(samples, list(loras), options.lora_assignment, args.seed)
        requests = Requests(llm, samples, loras, options, args.seed)
        llm.generate(requests.prompts[:1], requests.params[:1], requests.loras[:1], use_tqdm=False)
        started = time.perf_counter()
        use_tqdm = not options.disable_tqdm
        outputs = llm.generate(requests.prompts, requests.params, requests.loras, use_tqdm=use_tqdm)
        seconds = time.perf_counter() - started
    records = requests.records(outputs)
    found = figures(records, seconds, options.metric_percentiles, options.percentile_metrics)
    return offline_result("throughput", options, args, info, found, records)
