"""`outrider train-draft`: train a drafter, or the draft weights of an adapter, from the target's own outputs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.demo import DEMO_MODEL_NAME, demo_model_path
from ...spec_decode.training.options import METHODS, TrainOptions, wrong
from ..core.errors import InvalidRequestError, OutriderError

if TYPE_CHECKING:
    from ...spec_decode.training.data import Sample

_DESCRIPTION = """\
Train a drafter by distillation from a target model, or from the target with an adapter.

  eagle3, eagle, medusa   a head, written in the public format of its kind
  draft-lora              draft weights of an adapter for the drafter --draft, written as a PEFT adapter: the
                          folder draft/ of the adapter, or draft/<method>/

Data are lines of JSON: {"prompt": ...}, {"messages": [...]}, {"prompt": ..., "completion": ...}, {"text": ...} or
{"token_ids": [...]}. With --generate the target writes the completions itself, so that the drafter learns what the
target says; they are kept in the output folder, and a later run may take them as --data.
"""
RUN_FILE = "run.json"
GENERATED, GENERATED_EVAL = "generated.jsonl", "generated_eval.jsonl"
_OURS = (
    RUN_FILE,
    GENERATED,
    GENERATED_EVAL,
    "training_log.jsonl",
    "config.json",
    "model.safetensors",
    "medusa_lm_head.pt",
    "adapter_config.json",
    "adapter_model.safetensors",
)
_CHUNK = 256  # prompts that are generated between two writes


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
    groups: dict[str, Any] = {}
    hints = typing.get_type_hints(TrainOptions)
    for field in dataclasses.fields(TrainOptions):
        if not field.metadata:
            continue
        title = field.metadata["group"]
        groups.setdefault(title, parser.add_argument_group(title))
        _add_flag(groups[title], field, hints[field.name])
    parser.set_defaults(run=run)


def _add_flag(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    text = field.metadata["help"].replace("%", "%%")
    if field.default is not None and field.default is not False and field.default is not True:
        text += f" (default: {field.default})"
    flag, common = "--" + field.name.replace("_", "-"), {"dest": field.name, "default": field.default, "help": text}
    kinds = (
        [arg for arg in typing.get_args(hint) if arg is not type(None)] if isinstance(hint, types.UnionType) else [hint]
    )
    if kinds[0] is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif typing.get_origin(kinds[0]) is tuple:
        group.add_argument(flag, type=_integers, metavar="N,N,N", **common)
    elif "choices" in field.metadata:
        group.add_argument(flag, choices=field.metadata["choices"], **common)
    else:
        name = "NAME" if field.name.endswith("_name") else "PATH"
        group.add_argument(flag, type=kinds[0], metavar={int: "N", float: "X"}.get(kinds[0], name), **common)


def _integers(text: str) -> tuple[int, ...]:
    """An argparse type: integers with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between, got {text!r}") from None


def resolve(namespace: argparse.Namespace) -> TrainOptions:
    """The options of a command line.

    Raises:
        InvalidRequestError: an option is wrong.
    """
    options = TrainOptions(**{f.name: getattr(namespace, f.name) for f in dataclasses.fields(TrainOptions)})
    if options.model == DEMO_MODEL_NAME:
        options = dataclasses.replace(options, model=str(demo_model_path()))
    if not sys.stderr.isatty():
        options = dataclasses.replace(options, progress=False)
    options.check()
    return options


def prepare_output(options: TrainOptions) -> TrainOptions:
    """Make the output folder, or check that it may be used; returns the options, without `resume` on a fresh start.

    Raises:
        InvalidRequestError: it holds another run, or the run to resume had other options.
    """
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise wrong("output", f"{folder} is not a folder")
    if options.overwrite:
        for name in _OURS:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    elif options.resume:
        _check_same_run(options, folder)
    elif folder.is_dir() and any((folder / name).exists() for name in (*_OURS, "checkpoint")):
        raise wrong(
            "output", f"{folder} holds a model or an earlier run; give --resume to go on or --overwrite to delete it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_text(folder / RUN_FILE, json.dumps(options.comparable(), indent=2) + "\n")
    except OSError as error:
        raise wrong("output", f"{folder} cannot be written: {error}") from error
    return options


def _check_same_run(options: TrainOptions, folder: Path) -> None:
    file = folder / RUN_FILE
    if not file.is_file():
        raise wrong("resume", f"there is no run in {folder}")
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise wrong("resume", f"cannot read {file}: {error}") from error
    now = options.comparable()
    changed = next((name for name in now if now[name] != before.get(name)), None)
    if changed is not None:
        raise InvalidRequestError(
            f"--resume: the run in {folder} had {changed} {before.get(changed)!r}, this one has {now[changed]!r}",
            param=changed,
        )


def _write_text(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def generate(options: TrainOptions, prompts: list[list[int]], file: Path) -> None:
    """Let the target complete `prompts` into `file`, a line each; what is there from an interrupted run is kept."""
    from ..client.llm import LLM
    from ..core.lora_request import LoRARequest
    from ..core.sampling_params import SamplingParams

    done = _whole_lines(file)
    if done >= len(prompts):
        return
    engine: dict[str, Any] = {"dtype": options.dtype, "device": options.device, "seed": options.seed}
    lora = None
    if options.adapter is not None:
        lora = LoRARequest("target", path=options.adapter)
        engine |= {"enable_lora": True, "max_lora_rank": _rank_of(options.adapter)}
    with LLM(options.model, **engine) as llm, file.open("a", encoding="utf-8") as out:
        room = llm.engine_info.max_model_len
        longest = max(range(len(prompts)), key=lambda number: len(prompts[number]))
        if len(prompts[longest]) >= room:
            raise InvalidRequestError(
                f"prompt {longest + 1} of the data has {len(prompts[longest])} tokens; the model takes {room} with its "
                "completion",
                param="data",
            )
        for start in range(done, len(prompts), _CHUNK):
            chunk = prompts[start : start + _CHUNK]
            params = [
                SamplingParams(
                    temperature=options.temperature,
                    max_tokens=min(options.max_tokens, room - len(prompt)),
                    seed=None if options.temperature == 0 else options.seed + start + number,
                )
                for number, prompt in enumerate(chunk)
            ]
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in chunk], params, lora, use_tqdm=options.progress
            )
            for prompt, output in zip(chunk, outputs, strict=True):
                line = {"prompt_token_ids": prompt, "completion_token_ids": list(output.outputs[0].token_ids)}
                out.write(json.dumps(line) + "\n")
            out.flush()


def _whole_lines(file: Path) -> int:
    """Lines of a file that end; a half-written last one is cut off."""
    if not file.is_file():
        return 0
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with file.open("r+b") as opened:
            opened.truncate(end)
    return data.count(b"\n")


def _rank_of(adapter: str) -> int:
    """The largest rank that an adapter's configuration names; the engine says what is wrong with a broken one."""
    try:
        config = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
        return max(int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values()), 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 64


def load_samples(options: TrainOptions) -> tuple[list[Sample], list[Sample]]:
    """Samples to learn from and to measure on, generated where that is asked for."""
    from transformers import AutoConfig, AutoTokenizer

    from ...models.loader import resolve_model_path
    from ...spec_decode.training.data import Reader, hold_out

    folder = resolve_model_path(options.model)
    try:
        vocab_size = int(AutoConfig.from_pretrained(folder).vocab_size)
        reader = Reader(AutoTokenizer.from_pretrained(folder), vocab_size)
    except (OSError, ValueError) as error:
        raise OutriderError(f"--model {options.model}: its tokenizer or config cannot be read: {error}") from error

    def read(data: str, generated: str) -> list[Sample]:
        if not options.generate:
            return reader.samples(data, options.max_length)
        file = Path(options.output) / generated
        generate(options, reader.prompts(data), file)
        return reader.samples(file, options.max_length)

    samples = read(options.data, GENERATED)
    if options.eval_data is not None:
        return samples, read(options.eval_data, GENERATED_EVAL)
    return hold_out(samples, options.held_out, options.seed)


def run(namespace: argparse.Namespace) -> int:
    """Train; returns the exit status."""
    options = prepare_output(resolve(namespace))
    samples, held_out = load_samples(options)
    from ...spec_decode.training.run import train_draft

    print(f"{options.method}: {len(samples)} samples to learn from, {len(held_out)} to measure on", flush=True)
    try:
        measured = train_draft(options, samples, held_out, report=_report)
    except KeyboardInterrupt:
        print(
            f"interrupted; the same command with --resume goes on from the checkpoint in {options.output}", flush=True
        )
        raise
    print(f"acceptance length {measured.acceptance_length:.3f} with {options.k} drafts; written to {options.output}")
    return 0


def _report(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
