"""Compare Outrider with other engines on one CPU, with the same models and requests, in turn.

    python benchmarks/compare_peers.py --models DIR --output-json F
        [--peers vllm,transformers,openvino,llamacpp] [--modes base,lora,ngram,draft,int8,int4,w8a8,w4a16]
        [--sizes small,medium,smollm2] [--rounds 3] [--head DIR --chats FILE]

Each peer gets an environment of its own below --envs, made once (some GB each, a few minutes). --models gets what it
lacks: `small` (30M, Llama shape), `medium` (494M, Qwen2 shape), 8 adapters of ranks 8 and 16 for each, `draft`
(3M, for small); random weights; `smollm2` is SmolLM2-135M-Instruct, with its own weights.

The run is interleaved: for a model and a mode every engine has a process that lives through all rounds; in each round
and for each number of requests the engines are asked in turn, beginning with another one each time, while the
processes of the others are stopped. So a neighbour on a shared machine disturbs all alike, and ratios are taken within
a round. All requests of a size are handed over at once: 1 with a prompt of 32 tokens, 8 and 32 with 128; 64 output
tokens each, greedy, end-of-sequence ignored.

Modes: `lora` gives request i adapter i mod 8 (OpenVINO: one call for each adapter), `ngram` and `draft` make 4 drafts;
Outrider runs there a second time as `outrider-adaptive`, where it chooses how many, up to 4. `int8` and `int4` quantise
the weights as each engine does while loading or exporting: int4 in groups of 128 (smollm2: Outrider 32, OpenVINO 64),
llama.cpp Q8_0, Q4_0 and Q4_K_M; `w8a8` and `w4a16` are checkpoints of compressed-tensors, which vLLM reads too.
transformers has base and lora alone: its assisted generation takes one request at a time, as llama.cpp does in every
mode. `chat` and `eagle3` answer the prompts of `--chats`, without drafts and with 4 of the EAGLE-3 head `--head` (of
smollm2 alone; vLLM); 8 of them, so many at once as there are requests. Ctrl-C ends the run and keeps what there is.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.environments import PEERS, Engine, PeerError, export_to_openvino, make_gguf, prepare
from peers.report import ADAPTIVE, NOTE, OURS, summarize, tables
from peers.session import SIZES, Case, Results, Session, Size
from peers.worker import CHATS, STORED

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.platform.cli.bench.bench_options import write_json
from outrider.platform.cli.bench.machine import describe_machine
from outrider.platform.cli.bench.prompt_files import encode, read_prompts
from outrider.platform.cli.options.option_types import positive

MODES = ("base", "lora", "ngram", "draft", "int8", "int4", *STORED)
"""Modes that need no files of the user; measured by default."""
MODELS = ("small", "medium")
REAL = "smollm2"
"""Model that is not made here: `tools/real_models.py` makes it."""
GGUF = {"base": ("BF16",), "int8": ("Q8_0",), "int4": ("Q4_0", "Q4_K_M")}
"""Types of llama.cpp's files by mode."""
DRAFTED = ("small",)
"""Models with a draft model."""
ENVS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "peers"


def say(text: str) -> None:
    """Print progress on standard error; the result goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="folder of the models")
    parser.add_argument("--output-json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS), help="(default: all)")
    parser.add_argument(
        "--modes", type=_names((*MODES, *CHATS)), default=list(MODES), help="(default: all but chat and eagle3)"
    )
    parser.add_argument(
        "--sizes", type=_names((*MODELS, REAL)), default=list(MODELS), help="of the model (default: small,medium)"
    )
    parser.add_argument("--requests", type=_requests, default=list(SIZES), help="(default: 1,8,32)")
    parser.add_argument("--head", type=Path, metavar="DIR", help="EAGLE-3 head of smollm2, for mode eagle3")
    parser.add_argument("--chats", type=Path, metavar="FILE", help="prompts of modes chat and eagle3, JSONL")
    parser.add_argument("--rounds", type=positive, default=3, help="(default: %(default)s)")
    parser.add_argument("--envs", type=Path, default=ENVS, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=positive, default=900, help="seconds for one answer (default: %(default)s)")
    options = parser.parse_args(arguments)
    if set(CHATS) & set(options.modes) and (options.chats is None or options.sizes != [REAL]):
        parser.error(f"--modes chat and eagle3 need --chats, and --sizes {REAL}")
    if "eagle3" in options.modes and options.head is None:
        parser.error("--modes eagle3 needs --head")
    return options


def _names(known: Sequence[str] | dict[str, Any]) -> Any:
    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown: {name!r}; known are {', '.join(known)}")
        return list(dict.fromkeys(names))

    return read


def _requests(text: str) -> list[Size]:
    sizes = {str(size.requests): size for size in SIZES}
    return [sizes[name] for name in _names(sizes)(text)]


def prepare_peers(options: argparse.Namespace, results: Results) -> dict[str, Engine]:
    """Make environments and models. A peer that cannot be made is noted and left out."""
    from peers.models import make_missing
    from peers.quantised_models import make_quantised

    models = options.models.resolve()
    with_draft = "draft" in options.modes and not set(DRAFTED).isdisjoint(options.sizes)
    names = [*options.sizes, *(["draft"] if with_draft else [])]
    if REAL in names and not (models / REAL).exists():
        (models / REAL).symlink_to(_real_model())
    _put_chats(options, models)
    make_missing(models, names, options.sizes if "lora" in options.modes else [], say)
    for model, mode in itertools.product(options.sizes, options.modes):
        if mode in STORED:
            make_quantised(models, model, mode, say)
    engines = {}
    for name in options.peers:
        try:
            engine = prepare(name, options.envs.resolve(), say)
            for model, mode in itertools.product(names, options.modes):
                if name == "openvino":
                    export_to_openvino(engine, models, model, mode, say)
                if name == "llamacpp" and model != "draft":
                    for kind in GGUF.get(mode, ()):
                        make_gguf(engine, models, model, kind, say)
            engines[name] = engine
        except PeerError as error:
            results.fail(Case("all", "all"), name, str(error))
            say(f"{name} is left out: {error}")
    return engines


def _put_chats(options: argparse.Namespace, models: Path) -> None:
    """Put the head, and the chats' token ids, at the paths from which workers read them."""
    if options.chats is not None:
        tokenizer = load_tokenizer(models / REAL)
        ids = [encode(tokenizer, prompt.content, "--chats") for prompt in read_prompts(options.chats, "--chats")]
        (models / f"{REAL}-chats.json").write_text(json.dumps(ids), encoding="utf-8")
    if options.head is not None:
        place = models / f"{REAL}-eagle3"
        place.unlink(missing_ok=True)
        place.symlink_to(options.head.resolve())


def _real_model() -> Path:
    command = [sys.executable, str(Path(__file__).resolve().parent.parent / "tools" / "real_models.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


def engines_for(case: Case, peers: dict[str, Engine]) -> list[Engine]:
    """Engines of a mode: Outrider, for `ngram` and `draft` in two configurations, and the peers that have it."""
    ours = [Engine(OURS, Path(sys.executable))]
    if case.mode in ("ngram", "draft", "eagle3"):
        ours.append(Engine(ADAPTIVE, Path(sys.executable), worker_engine=OURS, arguments=("--adaptive",)))
    others = {name: engine for name, engine in peers.items() if case.mode in PEERS[name].modes}
    llamacpp = others.pop("llamacpp", None)
    if llamacpp is not None:
        for kind in GGUF[case.mode]:
            single = {"worker_engine": "llamacpp", "arguments": ("--gguf", kind), "most_requests": 1}
            others[kind] = dataclasses.replace(llamacpp, name=f"llamacpp-{kind}", **single)
    return [*ours, *others.values()]


def run(options: argparse.Namespace, results: Results) -> bool:
    """Measure all cases and write the result after each; True when interrupted."""
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        peers = prepare_peers(options, results)
        logs = options.envs.resolve() / "logs"
        session = Session(options.models.resolve(), logs, options.requests, options.rounds, options.timeout, say)
        for model in options.sizes:
            for mode in options.modes:
                if mode == "draft" and model not in DRAFTED:
                    say(f"{model} {mode}: there is no draft model for it")
                    continue
                case = Case(model, mode)
                session.run(case, engines_for(case, peers), results)
                write(options, results, interrupted=True)  # by now, it would be
    except KeyboardInterrupt:
        return True
    return False


def write(options: argparse.Namespace, results: Results, interrupted: bool) -> dict[str, Any]:
    """Write the result as JSON, whole or not at all, and return it."""
    report = {
        "machine": describe_machine() | {"usable_cores": len(os.sched_getaffinity(0))},
        "load_average": os.getloadavg(),
        "labels": [NOTE],
        "interrupted": interrupted,
        "settings": {
            "rounds": options.rounds,
            "sizes": [size._asdict() for size in options.requests],
            "modes": options.modes,
            "models": options.sizes,
            "dtype": "bfloat16",
        },
        "versions": {start["engine"]: start["versions"] for start in results.starts},
    } | summarize(results)
    write_json(report, options.output_json)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, measure, write and print; the exit status is 0 when Outrider was measured in every case."""
    options = parse(arguments)
    results = Results()
    options.output_json.parent.mkdir(parents=True, exist_ok=True)
    interrupted = run(options, results)
    report = write(options, results, interrupted)
    print(tables(report))
    failed = any(failure["engine"].startswith(OURS) for failure in report["failures"])
    return 130 if interrupted else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
