"""The output folder of a training run: checks before it is used, the description of the run, and --overwrite.

`run.json` holds the options that determine the result, those that determine the output of --generate, and digests of
the files that a run reads. It is written only when everything has been loaded, so that a failed start leaves nothing
behind. Nothing is deleted in a folder without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ...platform.core.errors import InvalidRequestError, NotFoundError
from ...platform.core.option import declared_options
from .options import METHODS, TrainOptions, reason, wrong
from .output_files import write_json

RUN_FILE = "run.json"
GENERATED, GENERATED_EVAL = "generated.jsonl", "generated_eval.jsonl"
_STATE = os.path.join("checkpoint", "state.pt")
_RESULTS = ("model.safetensors", "medusa_lm_head.pt", "adapter_model.safetensors")
_TRAINED = (*_RESULTS, _STATE)
OURS = (RUN_FILE, GENERATED, GENERATED_EVAL, "training_log.jsonl", "config.json", "adapter_config.json", *_TRAINED)
"""Files that a run writes."""
_INPUTS = ("model", "adapter", "draft", "data", "eval_data")
_DESCRIBING = ("config.json", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""Files of a model's or adapter's folder that identify it; a model's weights are too large to be read for that."""


def check_output(options: TrainOptions) -> None:
    """Refuse a folder that this run must not write to; changes nothing.

    Raises:
        InvalidRequestError: it is an input, holds something else, or the run to resume was another.
        NotFoundError: an input cannot be read.
    """
    folder = Path(options.output)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise wrong("output", f"{folder} is not a folder")
    _check_apart(options)
    found = next((name for name in OURS if os.path.lexists(folder / name)), None)
    if options.resume:
        _check_same_run(options, folder)
    elif options.overwrite and found is not None:
        _check_deletable(folder, found)
    elif found is not None:
        raise wrong(
            "output",
            f"{folder} has a model or an earlier run ({found}); give --resume to continue or --overwrite to delete it",
        )


def prepare_output(options: TrainOptions) -> None:
    """Make the folder ready: delete what --overwrite deletes, and write `run.json`.

    Raises:
        InvalidRequestError, NotFoundError: as `check_output`, or the folder cannot be written.
    """
    check_output(options)
    folder = Path(options.output)
    described, kept = describe(options), kept_files(options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if options.overwrite:
            for name in OURS:
                if name not in kept:
                    (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # missing, or not empty
                (folder / _STATE).parent.rmdir()
        write_json(folder / RUN_FILE, described)
    except OSError as error:
        raise wrong("output", f"{folder} cannot be written: {reason(error)}") from error


def has_ended(folder: Path) -> bool:
    """True for a run whose results are there, and whose checkpoint has been deleted."""
    results = any(os.path.lexists(folder / name) for name in _RESULTS)
    return results and not os.path.lexists(folder / _STATE)


def kept_files(options: TrainOptions) -> set[str]:
    """Files in the output folder with the completions that this run would generate."""
    if options.resume:
        return {GENERATED, GENERATED_EVAL}
    before = _read_run(Path(options.output))
    if not options.generate or before is None:
        return set()
    now, then = describe(options), before.get("files")
    if before.get("generation") != now["generation"]:
        return set()
    if not isinstance(then, dict) or any(then.get(name) != now["files"][name] for name in ("model", "adapter")):
        return set()
    inputs = {GENERATED: "data", GENERATED_EVAL: "eval_data"}
    return {file for file, name in inputs.items() if then.get(name) == now["files"][name]}


def describe(options: TrainOptions) -> dict[str, Any]:
    """Contents of `run.json`.

    Raises:
        NotFoundError: an input cannot be read.
    """
    digests = {name: _digest(name, getattr(options, name)) for name in _INPUTS}
    return options.comparable() | {"generation": options.generation(), "files": digests}


def _digest(option: str, path: str | None) -> str | None:
    """SHA-256 of a file, or of the files that identify a model's folder; None for a hub id, a pipe, or no path."""
    if not path:
        return None
    place = _place(option, path)
    files = [place]
    if option not in ("data", "eval_data"):
        files = [os.path.join(place, name) for name in _DESCRIBING]
    elif not os.path.exists(place):
        raise NotFoundError(f"--{option.replace('_', '-')}: cannot read {path}: there is no such file", param=option)
    files = [file for file in files if os.path.isfile(file)]
    digest = hashlib.sha256()
    try:
        for file in files:
            with open(file, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    except OSError as error:
        raise NotFoundError(
            f"--{option.replace('_', '-')}: cannot read {path}: {reason(error)}", param=option
        ) from error
    return digest.hexdigest() if files else None


def _place(option: str, path: str) -> str:
    """Path of an input; `~` is expanded for models alone, as when they are loaded."""
    return os.path.expanduser(path) if option in ("model", "draft") else path


def _check_apart(options: TrainOptions) -> None:
    """Inputs are neither the output folder nor in it. (The draft weights of an adapter may go into its folder.)"""
    folder = os.path.realpath(options.output)
    for name in _INPUTS:
        path = getattr(options, name)
        if not path:
            continue
        place = os.path.realpath(_place(name, path))
        if os.path.lexists(place) and os.path.commonpath((folder, place)) == folder:
            what = "is" if place == folder else "contains"
            raise wrong(
                "output", f"{options.output} {what} what --{name.replace('_', '-')} names; choose another folder"
            )


def _read_run(folder: Path) -> dict[str, Any] | None:
    """`run.json`; None if there is none of ours."""
    try:
        value = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value.get("method") in METHODS else None


def _check_deletable(folder: Path, found: str) -> None:
    if _read_run(folder) is None:
        raise wrong(
            "overwrite",
            f"deletes only an earlier run, and {folder} holds {found} without the {RUN_FILE} of one; delete it "
            "yourself or choose another --output",
        )
    unexpected = next((folder / name for name in OURS if os.path.isdir(folder / name)), None)
    if unexpected is not None:
        raise wrong("overwrite", f"does not delete folders, and {unexpected} is one")


def _check_same_run(options: TrainOptions, folder: Path) -> None:
    """Refuse other options than those that weights were trained with; before training only those of the data count."""
    if not os.path.lexists(folder / RUN_FILE):
        raise wrong("resume", f"there is no run in {folder}")
    before, now = _read_run(folder), describe(options)
    if before is None:
        raise wrong("resume", f"{folder / RUN_FILE} describes no run")
    then, files = before.get("files"), now.pop("files")
    for name, digest in files.items():
        if not isinstance(then, dict) or then.get(name) != digest:
            raise InvalidRequestError(
                f"--resume: what --{name.replace('_', '-')} names is not what the run in {folder} read; "
                "its content has changed",
                param=name,
            )
    if any(os.path.lexists(folder / name) for name in _TRAINED):
        _refuse_changes(before, now, folder)
    elif before.get("generation") != now["generation"]:
        _refuse_changes(before, {"generate": options.generate, **(now["generation"] or {})}, folder)


def _refuse_changes(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Compare options. A run of an older version had the defaults of those that it did not know."""
    before = {name: one.default for name, one in declared_options(TrainOptions).items()} | before
    changed = next((name for name in now if now[name] != before.get(name)), None)
    if changed is not None:
        raise InvalidRequestError(
            f"--resume: the run in {folder} had {changed} {before.get(changed)!r}, this one has {now[changed]!r}",
            param=changed,
        )
