"""`outrider train-draft`: train a drafter, or the draft weights of an adapter, from the target's own outputs."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.demo import DEMO_MODEL_NAME, demo_model_path
from ...spec_decode.training.options import METHODS, TrainOptions, reason
from ...spec_decode.training.run_folder import GENERATED, GENERATED_EVAL, check_output, kept_files, prepare_output
from ..core.errors import InvalidRequestError, OutriderError
from .adapter_rank import largest_rank
from .completions import complete, completed, put_in_order
from .draft_trial import describe_trial
from .options.field_flags import add_flags, given_fields

if TYPE_CHECKING:
    from ...spec_decode.training.data import Reader, Sample

_DESCRIPTION = """\
Train a drafter by distillation from a target model, or from the target with an adapter.

  eagle3, eagle, medusa   a head, written in the public format of its kind
  dflash, dspark          a drafter of whole blocks, likewise
  uno                     a LoRA through which the target drafts for itself, written as a PEFT adapter
  draft-lora              draft weights of an adapter for the drafter --draft, written as a PEFT adapter: the
                          folder draft/ of the adapter, or draft/<method>/

Data are lines of JSON: {"prompt": ...}, {"messages": [...]}, {"prompt": ..., "completion": ...}, {"text": ...} or
{"token_ids": [...]}. With --generate the target writes the completions itself, so that the drafter learns what the
target says; they are kept in the output folder, and a later run may take them as --data.
"""


def add_parser(commands: Any) -> None:
    """Add the command, with a flag for each field of `TrainOptions`."""
    parser = commands.add_parser(
        "train-draft",
        help="train a drafter, or an adapter's draft weights",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--method", required=True, choices=METHODS, help="what to train")
    parser.add_argument("--model", required=True, help="the target: a directory, a hub id, or outrider-demo")
    parser.add_argument("--data", required=True, metavar="FILE", help="JSONL with samples, or prompts for --generate")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="where the weights, the log and the checkpoint go"
    )
    add_flags(parser, TrainOptions)
    parser.set_defaults(run=run)


def resolve(namespace: argparse.Namespace) -> TrainOptions:
    """`TrainOptions` of a command line.

    Raises:
        InvalidRequestError: an option is wrong.
    """
    given = given_fields(TrainOptions, namespace)
    options = TrainOptions(**given)
    if options.model == DEMO_MODEL_NAME:
        options = dataclasses.replace(options, model=str(demo_model_path()))
    if not sys.stderr.isatty():
        options = dataclasses.replace(options, progress=False)
    options.check(given)
    return options


def generate(options: TrainOptions, jobs: Mapping[Path, Sequence[list[int]]], begin: Callable[[], None]) -> None:
    """Let the target complete the prompts of each file, one line for each. Existing completions are kept.

    Args:
        begin: called before the first file is written.
    """
    from ..client.llm import LLM
    from ..core.lora_request import LoRARequest

    engine: dict[str, Any] = {"dtype": options.dtype, "device": options.device, "seed": options.seed}
    lora = None
    if options.adapter is not None:
        lora = LoRARequest("target", path=options.adapter)
        engine |= {"enable_lora": True, "max_lora_rank": largest_rank(Path(options.adapter))}
    with LLM(options.model, **engine) as llm:
        for name, prompts in zip(("data", "eval_data"), jobs.values(), strict=False):
            _check_lengths(prompts, llm.engine_info.max_model_len, name)
        begin()
        for file, prompts in jobs.items():
            complete(options, llm, lora, prompts, file, _report)


def _check_lengths(prompts: Sequence[list[int]], room: int, option: str) -> None:
    longest = max(range(len(prompts)), key=lambda number: len(prompts[number]))
    if len(prompts[longest]) >= room:
        raise InvalidRequestError(
            f"prompt {longest + 1} of the {option.replace('_', '-')} has {len(prompts[longest])} tokens; "
            f"the model takes {room} with its completion",
            param=option,
        )


def _reader(options: TrainOptions) -> Reader:
    from ...models.checkpoint.paths import resolve_model_path
    from ...models.checkpoint.tokenizer import load_tokenizer
    from ...spec_decode.training.data import Reader
    from ...spec_decode.training.target import read_config

    folder = resolve_model_path(options.model)
    try:
        return Reader(load_tokenizer(folder), read_config(options.model).vocab_size)
    except Exception as error:  # broken files raise whatever the libraries run into
        message = f"--model {options.model}: its tokenizer or config cannot be read: {reason(error)}"
        raise OutriderError(message, param="model") from error


def load_samples(options: TrainOptions) -> tuple[list[Sample], list[Sample]]:
    """Training samples and evaluation samples, generated by the target with --generate."""
    from ...spec_decode.training.data import hold_out

    reader = _reader(options)
    files: list[str | Path] = [options.data] if options.eval_data is None else [options.data, options.eval_data]
    if options.generate:
        files = _generated(options, reader, files)
    samples = [reader.samples(file, options.max_length) for file in files]
    return (samples[0], samples[1]) if len(samples) > 1 else hold_out(samples[0], options.held_out, options.seed)


def _generated(options: TrainOptions, reader: Reader, files: Sequence[str | Path]) -> list[str | Path]:
    """Files with completions of the prompts in `files`. The other inputs of the run are checked before the work."""
    from ...spec_decode.training.data import check_held_out
    from ...spec_decode.training.run import load

    jobs = {
        Path(options.output) / name: reader.prompts(f)
        for name, f in zip((GENERATED, GENERATED_EVAL), files, strict=False)
    }
    if options.eval_data is None:
        check_held_out(options.held_out, len(next(iter(jobs.values()))))
    kept = kept_files(options)
    if all(file.name in kept and len(completed(file)) >= len(prompts) for file, prompts in jobs.items()):
        prepare_output(options)
        for file in jobs:
            put_in_order(file)
    else:
        load(options)
        gc.collect()  # the engine needs the room
        generate(options, jobs, begin=lambda: prepare_output(options))
    return list(jobs)


def run(namespace: argparse.Namespace) -> int:
    """Train; returns the exit status."""
    options = resolve(namespace)
    check_output(options)
    if not options.progress:
        from transformers.utils import logging

        logging.disable_progress_bar()
    samples, held_out = load_samples(options)
    from ...spec_decode.training.run import train_draft

    def begin() -> None:
        if not options.generate:  # else it has been done before the completions were written
            prepare_output(options)

    print(f"{options.method}: {len(samples)} samples to learn from, {len(held_out)} to measure on", flush=True)
    try:
        measured = train_draft(options, samples, held_out, _report, begin)
    except (KeyboardInterrupt, SystemExit):
        print(
            f"interrupted; the same command with --resume continues from the checkpoint in {options.output}", flush=True
        )
        raise
    print(f"acceptance length {measured.acceptance_length:.3f} with {options.k} drafts; written to {options.output}")
    if options.trial:
        gc.collect()  # the engines need the room
        try:
            for line in describe_trial(options, held_out):
                _report(line)
        except (OutriderError, RuntimeError, MemoryError) as error:  # the weights are written: the run has not failed
            _report(f"whether serving it pays could not be measured: {reason(error)}")
    return 0


def _report(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
