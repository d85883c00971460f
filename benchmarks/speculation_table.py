"""Every drafter on a real model: the base, adapters with and without draft weights, and adapters whose drafts have
learnt from their traffic; then adaptive drafting in batches.

    python benchmarks/speculation_table.py --model MODEL --heads DIR --adapters DIR --prompts DIR --work DIR \\
        --output-json benchmarks/results/speculation-smollm2.json [--parts 'chat;rewriting;...']

    HEADS/{eagle3,dflash}                   written by `outrider train-draft`; dflash may be missing
    ADAPTERS/{json,sql,support}             PEFT adapters, with draft weights for the EAGLE-3 head in draft/eagle3
    PROMPTS/[held-out-]*.jsonl              written by speculation_prompts.py

A part is one run of `outrider bench speculation`, but `learning`. Its result is kept in WORK: a part that is there is
not measured again, and an interrupted measurement continues with the next part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from checkout import use_checkout

use_checkout()

from speculation_prompts import TASKS  # noqa: E402

from outrider import LoRARequest  # noqa: E402
from outrider.platform.cli.adapter_rank import largest_rank  # noqa: E402
from outrider.platform.cli.bench.engine_runs import BLOCK_SIZE, Run, freeze_heap, num_blocks  # noqa: E402
from outrider.platform.cli.bench.machine import describe_machine  # noqa: E402
from outrider.platform.cli.bench.prompt_files import encode, read_prompts  # noqa: E402
from outrider.platform.cli.bench.request_figures import Round, acceptance, sum_speculation  # noqa: E402
from outrider.platform.cli.bench.speculation.rounds import Plan, make_requests  # noqa: E402
from outrider.platform.cli.bench.speculation.tasks import Task  # noqa: E402
from outrider.platform.core.config import EngineArgs  # noqa: E402
from outrider.platform.engine.engine_core import EngineCore  # noqa: E402

CLAIM = "Speculation on SmolLM2-135M-Instruct: drafters, adapters, draft weights, learning, batches"
MAX_TOKENS, MAX_LENGTH = 96, 512
DRAFTS = 4
"""Drafts a step of heads with a fixed number."""
TENANT = "learning"
HEADS = ("eagle3", "dflash")
BATCHES = "4,16,32"


def parts_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Options of `outrider bench speculation` by part."""
    found = [name for name in HEADS if (options.heads / name).is_dir()]
    heads = [word for name in found for word in (f"--{name}", str(options.heads / name))]
    loras = [word for task in TASKS for word in ("--lora", f"{task}={options.adapters / task}")]
    dflash = "dflash:4,adaptive:dflash:4," if "dflash" in found else ""
    modes = {
        "chat": f"off,ngram:4,suffix:8,eagle3:2,eagle3:4,{dflash}adaptive:ngram:16,adaptive:eagle3:16,oracle:8",
        "rewriting": f"off,ngram:4,suffix:8,eagle3:4,{dflash}adaptive:ngram:16,adaptive:eagle3:16,oracle:16",
        "adapters": "off,ngram:4,suffix:8,eagle3:2,eagle3:4,adaptive:eagle3:16,oracle:8",
    }
    single = ["--batch-sizes", "1", "--rounds", str(options.rounds)]
    batches = ["--modes", "off,adaptive:eagle3:16", "--batch-sizes", BATCHES, "--tasks", "base", *heads]
    parts: dict[str, list[str]] = {}
    for kind in ("chat", "rewriting"):
        parts[kind] = ["--modes", modes[kind], "--tasks", "base", *prompts_of(options, kind), *heads, *single]
    parts["adapters"] = ["--modes", modes["adapters"], "--tasks", ",".join(TASKS), *loras, *heads, *single]
    parts["adapters"] += prompts_of(options, *TASKS)
    for queue, length, rounds in (("closed", "1", max(1, options.rounds - 1)), ("queued", "2", 1)):
        for kind in ("chat", "rewriting"):
            random = ["--random-text"] if kind == "chat" else []
            run = ["--queue", length, "--rounds", str(rounds), *prompts_of(options, kind, count=16), *random]
            parts[f"{kind}, {queue}"] = [*batches, *run]
    return parts


def prompts_of(options: argparse.Namespace, *kinds: str, count: int | None = None) -> list[str]:
    """Option with `count` held-out prompts of each of these kinds (default: `--num-prompts`); those of tasks name the
    adapter."""
    count = count or options.num_prompts
    file = options.work / f"prompts-{'-'.join(kinds)}-{count}.jsonl"
    lines = []
    for kind in kinds:
        found = (options.prompts / f"held-out-{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        adapter = {"adapter": kind} if kind in TASKS else {}
        lines += [json.dumps(json.loads(line) | adapter) + "\n" for line in found[:count]]
    file.write_text("".join(lines), encoding="utf-8")
    return ["--prompts", str(file)]


def bench(options: argparse.Namespace, words: Sequence[str], file: Path) -> None:
    """Run `outrider bench speculation`, which writes `file`."""
    command = [sys.executable, "-m", "outrider.platform.cli.main", "bench", "speculation", "--model", options.model]
    command += ["--max-tokens", str(options.max_tokens)]
    subprocess.run([*command, *words, "--output-json", str(file)], check=True)


# --- Drafts that learn --------------------------------------------------------------------------------------


class Learner:
    """Two engines, one whose EAGLE-3 head learns from the requests of `TENANT`, and one without speculation."""

    def __init__(self, options: argparse.Namespace, task: str) -> None:
        self._options = options
        self._lora = LoRARequest(task, path=str(options.work / f"bare-{task}"))
        learn = {"tenants": [TENANT], "share": 1.0, "max_running": 0}
        head = {"method": "eagle3", "model": str(options.heads / "eagle3"), "num_speculative_tokens": DRAFTS}
        self.learning = self._engine(head | {"learn": learn})
        self.off = self._engine({"method": "off"})
        for core in (self.learning, self.off):
            core.adapters.load(self._lora)

    def _engine(self, speculation: dict[str, Any]) -> EngineCore:
        return EngineCore(
            EngineArgs(
                model=self._options.model,
                speculative_config=speculation,
                enable_lora=True,
                max_lora_rank=largest_rank(Path(self._lora.path)),
                max_loras=2,
                max_model_len=MAX_LENGTH,
                max_num_seqs=1,
                block_size=BLOCK_SIZE,
                num_gpu_blocks_override=num_blocks(MAX_LENGTH) * 2,
                enable_prefix_caching=False,
            )
        )

    def run(self, core: EngineCore, prompts: Sequence[list[int]], eos: tuple[int, ...]) -> Round:
        """Answer prompts, one after the other."""
        plan = Plan(batch_sizes=(1,), rounds=1, max_tokens=self._options.max_tokens, eos_token_ids=eos)
        requests = make_requests(Task(TENANT, list(prompts)), 1, plan)
        return Run(core, TENANT).complete([replace(r, lora=self._lora, tenant=TENANT) for r in requests], 1)

    def train(self) -> float:
        """Train as long as there is something to train on. Returns seconds."""
        started = time.perf_counter()
        while (wait := self.learning.learn()) is not None:
            time.sleep(wait)
        return time.perf_counter() - started


def measure_learning(options: argparse.Namespace, file: Path) -> None:
    """Acceptance and speed on held-out prompts before and after a tenant's requests, by adapter."""
    import shutil

    from outrider.models.checkpoint.tokenizer import eos_token_ids, load_tokenizer

    path = Path(options.model)
    tokenizer = load_tokenizer(path)
    eos = tuple(sorted(eos_token_ids(path, tokenizer)))
    rows = []
    for task in options.learning.split(","):
        bare = options.work / f"bare-{task}"
        if not bare.exists():
            shutil.copytree(options.adapters / task, bare, ignore=shutil.ignore_patterns("draft"))
        seen, unseen = (
            [encode(tokenizer, p.content, "prompts") for p in read_prompts(options.prompts / f"{name}.jsonl", "")]
            for name in (task, f"held-out-{task}")
        )
        engines = Learner(options, task)
        freeze_heap()
        before = engines.run(engines.learning, unseen[: options.num_prompts], eos)
        lengths, trained = [], 0.0
        for first in range(0, options.requests, 8):
            found = engines.run(engines.learning, seen[first : first + 8], eos)
            lengths.append(acceptance(sum_speculation(found.requests)).get("acceptance_length"))
            trained += engines.train()
        rounds = []
        for number in range(options.rounds + 1):
            pair = {}
            for name in ("learning", "off")[:: 1 if number % 2 else -1]:
                pair[name] = engines.run(getattr(engines, name), unseen[: options.num_prompts], eos)
            rounds.append(pair)
        speedups = [pair["learning"].speed / pair["off"].speed for pair in rounds[1:]]
        after = Round.joined([pair["learning"] for pair in rounds[1:]])
        texts = [[r.token_ids for r in rounds[-1][name].requests] for name in ("learning", "off")]
        rows.append(
            {
                "task": task,
                "requests": options.requests,
                "acceptance_length_before": acceptance(sum_speculation(before.requests))["acceptance_length"],
                "acceptance_length_by_eight_requests": lengths,
                "acceptance_length": acceptance(sum_speculation(after.requests))["acceptance_length"],
                "speedup": round(median(speedups), 4),
                "speedups": [round(one, 4) for one in speedups],
                "training_seconds": round(trained, 1),
                "longest_slice_seconds": round(engines.learning.learner.longest_slice, 4),
                "same_text_as_off": {"same": sum(a == b for a, b in zip(*texts, strict=True)), "of": len(texts[0])},
            }
        )
        for core in (engines.learning, engines.off):
            core.shutdown()
    file.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


# --- Tables -------------------------------------------------------------------------------------------------

COLUMNS = {
    "ngram:4": "n-gram, 4",
    "suffix:8": "suffix, 8",
    "eagle3:2": "EAGLE-3, 2",
    "eagle3:4": "EAGLE-3, 4",
    "dflash:4": "DFlash, 4",
    "adaptive:ngram:16": "adaptive, n-gram",
    "adaptive:eagle3:16": "adaptive, EAGLE-3",
    "adaptive:dflash:4": "adaptive, DFlash",
    "oracle": "oracle",
}
"""Modes of the first table, and their names there. A number is that of the drafts a step."""


def drafters_table(runs: dict[str, Any]) -> dict[str, Any]:
    """Speed-up over off by text and drafter; in brackets the acceptance length, and the share of the oracle's."""

    def cell(row: dict[str, Any]) -> str:
        found = [row.get("acceptance_length"), row.get("of_oracle")]
        return f"{row['speedup']:.2f} ({', '.join('-' if value is None else f'{value:.2f}' for value in found)})"

    texts: dict[str, dict[str, str]] = {}
    oracles = {}
    for part in ("chat", "rewriting", "adapters"):
        for row in runs.get(part, {"rows": []})["rows"]:
            name = f"`{row['task']}`, {row['kind']}" if part == "adapters" else part
            texts.setdefault(name, {})[("oracle" if row["method"] == "oracle" else row["mode"])] = cell(row)
            if row["method"] == "oracle":
                oracles[row["task"]] = row["speedup"]
    for row in runs.get("learning", {"rows": []})["rows"]:
        limit = oracles.get(row["task"])
        share = {"of_oracle": row["speedup"] / limit if limit else None}
        texts[f"`{row['task']}`, after {row['requests']} requests"] = {"eagle3:4": cell(row | share)}
    columns = {mode: name for mode, name in COLUMNS.items() if any(mode in found for found in texts.values())}
    rows = [[name, *(found.get(mode, "") for mode in columns)] for name, found in sorted(texts.items())]
    return {"head": ["", *columns.values()], "rows": rows}


def batches_table(runs: dict[str, Any]) -> dict[str, Any]:
    """Adaptive drafting over off by text, queue and batch size."""
    cells: dict[str, dict[int, str]] = {}
    for part in (f"{kind}, {queue}" for kind in ("chat", "rewriting") for queue in ("closed", "queued")):
        for row in runs.get(part, {"rows": []})["rows"]:
            if row["mode"].startswith("adaptive"):
                name = part.replace("chat", "random ids") if row["kind"] == "random" else part
                cells.setdefault(name, {})[row["batch_size"]] = f"{row['speedup']:.2f}"
    sizes = [int(size) for size in BATCHES.split(",")]
    return {
        "head": ["adaptive over off", f"{sizes[0]} requests", *map(str, sizes[1:])],
        "rows": [[name, *(found.get(size, "") for size in sizes)] for name, found in cells.items()],
    }


def write_result(file: Path, found: list[dict[str, Any]]) -> None:
    """Write the parts, and the tables that the pages show."""
    runs = {run["run"]: run for run in found}
    made = {"drafters": drafters_table(runs), "batches": batches_table(runs)}
    tables = [{"run": name, "machine": describe_machine(), "table": table} for name, table in made.items()]
    text = json.dumps({"claim": CLAIM, "runs": [*found, *tables]}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Measure the parts that are missing, and write all into one result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    for name in ("heads", "adapters", "prompts", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    parser.add_argument("--parts", help="separated by semicolons (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=4, help="of a kind, with one request at a time")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--learning", default=TASKS[-1], help="adapters whose drafts learn (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="from which drafts learn, for each adapter")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    parts = parts_of(options)
    found = []
    wanted = options.parts.split(";") if options.parts else [*list(parts)[:3], "learning", *list(parts)[3:]]
    for name in wanted:
        file = options.work / f"{name.replace(', ', '-')}.json"
        started = time.perf_counter()
        if not file.exists():
            if name == "learning":
                measure_learning(options, file)
            else:
                bench(options, parts[name], file)
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        found.append({"run": name, **json.loads(file.read_text(encoding="utf-8"))})
        if options.output_json:
            write_result(options.output_json, found)


if __name__ == "__main__":
    main()
