"""Render the tables of README.md and docs/ from the results in benchmarks/results/.

A page marks the place of a table:

    <!-- figures: peers -->
    (rendered lines)
    <!-- end -->

Usage: python tools/render_figures.py [--check]

With --check nothing is written; the exit status is 1 when a page differs from its results.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/benchmarks.md", "docs/guides/models.md")
BEGIN, NAME_END, END = "<!-- figures: ", " -->\n", "<!-- end -->"
Row = dict[str, Any]
LINE = 120
"""Characters of a line of prose."""


def runs(name: str) -> dict[str, Row]:
    """Runs of a result file by their names: the content of each `run`, with its own machine, commit and command."""
    return {run["run"]: run for run in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["runs"]}


def number(value: float | None) -> str:
    """A ratio with two digits; an empty cell if nothing was measured."""
    return "" if value is None else f"{value:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def source(*names: str, keep: Callable[[Row], bool] = lambda run: True, dated: bool = True) -> list[str]:
    """Machines, results and, if `dated`, dates and commits of the runs to `keep`. Runs named after AMX are not in the
    tables."""
    machines: dict[str, None] = {}
    files = []
    for name in names:
        times: dict[str, None] = {}
        for run in (run for run in runs(name).values() if keep(run) and "AMX" not in run["run"]):
            machine = run["machine"]
            features = machine["capability"] + (" with AMX" if machine.get("amx") else "")
            processor = f"{machine['cpu']} ({features}), {machine['threads']} of {machine['cores']} cores"
            machines[machine.get("gpu") or processor] = None
            times[f"{machine['date']} at {machine['commit']}"] = None
        files.append(f"[{name}]({{results}}/{name}.json)" + (f" ({', '.join(times)})" if dated else ""))
    return textwrap.wrap(f"{'; '.join(machines)}. {', '.join(files)}.", LINE, break_on_hyphens=False)


def written_table(name: str, run: str) -> list[str]:
    """The table that the script of a run has written into its result."""
    found = runs(name)[run]["table"]
    return [*table(found["head"], found["rows"]), "", *source(name, keep=lambda one: one["run"] == run)]


# --- Other engines ------------------------------------------------------------------------------------------

SMALL = ("27M", "27M, transformers", "27M, OpenVINO")
MEDIUM = ("494M, base", "494M, lora", "494M, ngram")
SIZES = (1, 8, 32)


def peer_ratio(names: Sequence[str], mode: str, peer: str, requests: int) -> float | None:
    """The ratio of output tokens/s to those of `peer`, from the first of these runs that has it."""
    for name in names:
        for row in runs("peers")[name]["ratios"]:
            if (row["mode"], row["engine"], row["peer"], row["requests"]) == (mode, "outrider", peer, requests):
                return float(row["ratio"])
    return None


def peers() -> list[str]:
    """Output tokens/s over those of other engines."""
    kinds = {
        "vLLM, base": ("base", "vllm"),
        "vLLM, 8 adapters in the batch": ("lora", "vllm"),
        "vLLM, n-gram, 4 drafts": ("ngram", "vllm"),
        "transformers + PEFT, base": ("base", "transformers"),
        "transformers + PEFT, 8 adapters": ("lora", "transformers"),
        "OpenVINO GenAI, base": ("base", "openvino"),
        "OpenVINO GenAI, 8 adapters (one call each)": ("lora", "openvino"),
    }
    rows = [
        [label, *(number(peer_ratio(names, mode, peer, n)) for names in (SMALL, MEDIUM) for n in SIZES)]
        for label, (mode, peer) in kinds.items()
    ]
    head = ["Outrider over", "27M: 1 request", "8", "32", "494M: 1", "8", "32"]
    return [*table(head, rows), "", *source("peers")]


def quantised_peers() -> list[str]:
    """Output tokens/s over those of other engines with quantised weights."""
    kinds = {
        "int8 over llama.cpp Q8_0": ("int8", "llamacpp-Q8_0"),
        "int8 over OpenVINO GenAI int8": ("int8", "openvino"),
        "W8A8 over vLLM": ("w8a8", "vllm"),
        "int4 over llama.cpp Q4_0": ("int4", "llamacpp-Q4_0"),
        "int4 over llama.cpp Q4_K_M": ("int4", "llamacpp-Q4_K_M"),
        "int4 over OpenVINO GenAI int4": ("int4", "openvino"),
        "W4A16 over vLLM": ("w4a16", "vllm"),
    }
    names = (("494M, quantised", "494M, vLLM int8", "494M, vLLM int4"), ("SmolLM2, quantised",))
    cells = [(name, n) for name in names for n in (1, 8)]
    rows = [[label, *(number(peer_ratio(name, *key, n)) for name, n in cells)] for label, key in kinds.items()]
    return table(["Outrider", "494M: 1 request", "8", "SmolLM2-135M: 1", "8"], rows)


# --- Adapters, products, prompts ----------------------------------------------------------------------------


def lora_ratio(name: str, batch: int) -> float:
    """Output tokens/s with eight adapters over an engine that takes none: the median of the rounds' ratios."""
    rows = [row for row in runs("lora")[name]["rows"] if row["batch_size"] == batch]
    (base,) = (row["rounds"] for row in rows if row["num_adapters"] is None)
    (eight,) = (row["rounds"] for row in rows if row["num_adapters"] == 8)
    by_round = {entry["round"]: entry["output_throughput"] for entry in base}
    return median(entry["output_throughput"] / by_round[entry["round"]] for entry in eight)


def lora() -> list[str]:
    """Output tokens/s with eight adapters over the base model's, by number of requests."""
    rows = [[f"{model}, 8 adapters", *(number(lora_ratio(model, n)) for n in SIZES)] for model in ("27M", "494M")]
    return [*table(["requests at once", "1", "8", "32"], rows), "", *source("lora")]


def products() -> list[str]:
    """Share of the nearer hardware limit that a step's products reach."""
    rows = []
    head: list[str] = []
    for model, run in ((name, run) for name, run in runs("products").items() if "products" in run):
        head = [str(product["rows"]) for product in run["products"]]
        shares = [number(product["of_the_ceiling"]) for product in run["products"]]
        limits = [f"{run[key]:.0f}" for key in ("read_gigabytes_per_second", "register_gigamacs_per_second")]
        rows.append([model, *shares, *limits])
    head = ["rows", *head, "memory, GB/s", "multiply-adds, billions/s"]
    return [*table(head, rows), "", *source("products", keep=lambda run: "products" in run)]


def long_prompts() -> list[str]:
    """Inter-token latency of streams while long prompts arrive."""
    found = runs("long-prompts")
    prefix = [run["shared_prefix"] for run in found.values()]
    beside = [run["interference"] for run in found.values()]

    def pairs(parts: list[Row], first: str, second: str, scale: float = 1.0, digits: int = 2) -> list[str]:
        return [f"{part[first] * scale:.{digits}f}, {part[second] * scale:.{digits}f}" for part in parts]

    rows = {
        "TTFT with a cached prefix over the first one's: median, worst": pairs(prefix, "median_ratio", "max_ratio"),
        "ITL of 8 streams alone, ms: median, p99": pairs(beside, "alone_median", "alone_p99", 1e3, 1),
        "ITL while long prompts arrive, ms: median, p99": pairs(beside, "beside_median", "beside_p99", 1e3, 1),
        "TTFT of the long prompts, s": [f"{part['long_ttft_median']:.1f}" for part in beside],
    }
    return [*table(["", *found], ([text, *cells] for text, cells in rows.items())), "", *source("long-prompts")]


NEIGHBOUR_CASES = {
    "chat": "8 chats, `LLM`",
    "serving": "8 chats, engine process",
    "prompt": "a prompt of 2048 tokens",
    "ngram": "8 chats, n-gram, 4 drafts",
    "draft": "8 chats, draft model, 4 drafts",
}
NEIGHBOUR_WAYS = ("this", "baseline, default", "baseline, spin 10000", "baseline, passive", "baseline, one thread")


def neighbours() -> list[str]:
    """Median seconds alone and with busy loops, by case and way to share work; empty if nothing was measured."""
    cells = {case: ways for run in runs("serving").values() for case, ways in run.get("median_seconds", {}).items()}
    rows = []
    for case, name in NEIGHBOUR_CASES.items():
        found = [cells[case].get(way) for way in NEIGHBOUR_WAYS]
        rows.append([name, *(f"{c['alone']:.2f}, {c['beside neighbours']:.2f}" if c else "" for c in found)])
    head = ["seconds alone, with loops", "pool", "OpenMP", "it with 10,000 spins", "it passive", "one thread"]
    return [*table(head, rows), "", *source("serving")]


def fp8_cache() -> list[str]:
    """Decoding speed with a float8 KV cache over bfloat16, by context and number of requests."""
    speed = runs("products")["fp8 cache, demo and 494M"]["speed"]
    rows = [[str(row["context"]), str(row["batch"]), number(row["ratio"])] for row in speed]
    lines = table(["tokens of context", "requests", "fp8 over bfloat16"], rows)
    return [*lines, "", *source("products", keep=lambda run: "speed" in run)]


# --- Speculation --------------------------------------------------------------------------------------------

MODES = {
    "control": "control (a second engine without speculation)",
    "draft_model": "draft model, 4 drafts",
    "eagle3": "EAGLE-3, 4 drafts",
}


def adapter_row(name: str, task: str, kind: str, mode: str) -> Row | None:
    """One cell of the result `speculation-adapters`; None if the run has none."""
    for row in runs("speculation-adapters")[name]["rows"]:
        if (row["task"], row["kind"], row["mode"]) == (task, kind, mode):
            return row
    return None


def speculation_adapters() -> list[str]:
    """Speed-up and acceptance length of the base model and of adapters, one request at a time."""

    def cell(name: str, task: str, kind: str, mode: str) -> str:
        row = adapter_row(name, task, kind, mode)
        return "" if row is None else f"{row['speedup']:.2f} ({row['acceptance_length']:.2f})"

    kinds = {"base": {"base": "base model"}}
    for task in ("json", "sql", "support"):
        labels = f"`{task}`, with draft weights", f"`{task}`, without"
        kinds[task] = dict(zip(labels, ("with draft weights", "without draft weights"), strict=True))
    rows = [
        [label, *(cell(name, task, kind, mode) for name in runs("speculation-adapters") for mode in list(MODES)[1:])]
        for task, labels in kinds.items()
        for label, kind in labels.items()
    ]
    head = ["", *(f"{kind}, {name}" for name in runs("speculation-adapters") for kind in ("draft model", "EAGLE-3"))]
    return [*table(head, rows), "", *source("speculation-adapters")]


def by_batch_size(is_demo: bool) -> list[str]:
    """Speed-up by mode and number of requests: 16 and 32 from the last run that has them, which has more rounds."""
    texts = ("base", "random")

    def keep(run: Row) -> bool:
        return bool(run["run"].startswith("demo")) == is_demo

    def cell(text: str, mode: str, size: int) -> str:
        for run in filter(keep, reversed(runs("speculation-batches").values())):
            for row in run["rows"]:
                if (row["mode"], row["batch_size"]) == (mode, size) and (row["task"] == "base") == (text == "base"):
                    return number(row["speedup"])
        return ""

    rows = [[label, *(cell(text, mode, n) for text in texts for n in (1, 4, 16, 32))] for mode, label in MODES.items()]
    head = ["", "1 request", "4", "16", "32", "random text: 1", "4", "16", "32"]
    return [*table(head, rows), "", *source("speculation-batches", keep=keep)]


def controller() -> list[str]:
    """Speed-up of adaptive prompt lookup, of an earlier controller in the same rounds, and of the best fixed number."""
    rows = []
    for name, run in runs("controller").items():
        for cell in run["cells"]:
            kind = f"{cell['text']}, {cell['queue']}" if cell["batch"] > 1 else cell["text"]
            ratios = (number(cell.get(key)) for key in ("new/off", "old/off", "new/old", "new/fixed"))
            rows.append([name, str(cell["batch"]), kind, *ratios])
    head = ["model", "requests", "text", "adaptive over off", "earlier controller over off"]
    head += ["adaptive over earlier", "adaptive over best fixed number"]
    return [*table(head, rows), "", *source("controller")]


def gpu_engines() -> list[str]:
    """Decoding of models of real shapes on a GPU, alone and with as many adapters as requests."""
    found = {row["name"]: row for size in ("8B", "0.6B") for row in runs("gpu")[f"engine of {size}"]["rows"]}
    rows = []
    for model in ("Llama-3-8B", "Qwen3-0.6B"):
        for n in (1, 8, 32, 64, 256):
            alone = found.get(f"{model} decode x {n}", {})
            adapted = found.get(f"{model} adapters {n} x {n} requests", {})
            cells = [f"{alone[key]:,.0f}" if key in alone else "" for key in ("tokens_per_second", "percent_of_limit")]
            step = adapted.get("base_milliseconds") or alone.get("milliseconds")
            more = [f"{value:.2f}" if value else "" for value in (step, adapted.get("milliseconds"))]
            if alone or adapted:
                rows.append([model, str(n), *cells, *more])
    head = ["model", "requests", "tokens/s", "% of limit", "ms a step", "ms with an adapter each"]
    return [*table(head, rows), "", *source("gpu")]


def gpu_kernels() -> list[str]:
    """Times of kernels on a GPU, and their shares of its copy bandwidth."""
    ends = "to 28672, 1 tokens", "to 28672, 2048 tokens"
    rows = {row["name"]: row for run in ("kernels", "faster kernels") for row in runs("gpu")[run]["rows"]}
    found = [row for name, row in rows.items() if "linear" not in name or name.endswith(ends)]
    cells = ([row["name"], *(f"{row[key]:,.0f}" for key in ("microseconds", "percent_of_copy"))] for row in found)
    return [*table(["work", "µs", "% of the copy bandwidth"], cells), "", *source("gpu")]


# --- Families -----------------------------------------------------------------------------------------------


def families() -> list[str]:
    """Results of the tests of each family: largest differences of a log probability, and equal texts."""
    checks = ("speculation", "prefix cache", "chunks", "preemption", "quantised")
    rows = []
    for run in runs("families").values():
        for row in run["families"]:
            errors = [f"{error:.0e}" for error in row["errors"]]
            equal = ["equal" if check in row["shown"] else "" for check in checks]
            rows.append([f"`{row['architecture']}`", row["code"], *errors, *equal])
    head = ["architecture", "code", "base", "LoRA", *checks]
    return [*table(head, sorted(rows)), "", *source("families")]


# --- The README's table -------------------------------------------------------------------------------------


def summary() -> list[str]:
    """The claims of the README in one table: other engines, adapters, draft weights of adapters."""
    rows = [
        [label, *(number(peer_ratio(MEDIUM, mode, "vllm", n)) for n in SIZES)]
        for label, mode in {
            "494M, base model, over vLLM": "base",
            "494M, 8 adapters in the batch, over vLLM": "lora",
            "494M, n-gram with 4 drafts, over vLLM": "ngram",
        }.items()
    ]
    rows += [
        [f"27M, 8 adapters, over {label}", *(number(peer_ratio(SMALL, "lora", peer, n)) for n in SIZES)]
        for label, peer in {"transformers + PEFT": "transformers", "OpenVINO GenAI": "openvino"}.items()
    ]
    rows.append(["494M, 8 adapters, over the base model alone", *(number(lora_ratio("494M", n)) for n in SIZES)])
    for task, kind in [(t, f"{w} draft weights") for t in ("json", "support") for w in ("with", "without")]:
        row = adapter_row("4 drafts", task, kind, "eagle3")
        assert row is not None
        label = f"494M, EAGLE-3, adapter `{task}` {kind}, over no speculation"
        rows.append([label, number(row["speedup"]), "", ""])
    lines = source("peers", "lora", "speculation-adapters", keep=lambda run: "int" not in run["run"], dated=False)
    return [*table(["output tokens/s", "1 request", "8", "32"], rows), "", *lines]


FIGURES: dict[str, Callable[[], list[str]]] = {
    "summary": summary,
    "peers": peers,
    "quantised-peers": quantised_peers,
    "eagle3-peers": lambda: written_table("peers", "SmolLM2, EAGLE-3"),
    "lora": lora,
    "products": products,
    "long-prompts": long_prompts,
    "neighbours": neighbours,
    "fp8-cache": fp8_cache,
    "speculation-adapters": speculation_adapters,
    "speculation-batches": lambda: by_batch_size(is_demo=False),
    "speculation-demo": lambda: by_batch_size(is_demo=True),
    "speculation-real": lambda: written_table("speculation-smollm2", "drafters"),
    "speculation-own-prompts": lambda: written_table("speculation-smollm2", "own prompts"),
    "speculation-real-batches": lambda: written_table("speculation-smollm2", "batches"),
    "rollouts": lambda: written_table("rollouts", "rollouts"),
    "training": lambda: written_table("rollouts", "training"),
    "controller": controller,
    "families": families,
    "fleet": lambda: written_table("fleet", "fleet"),
    "fleet-foretold": lambda: written_table("fleet", "two replicas"),
    "gpu-engines": gpu_engines,
    "gpu-kernels": gpu_kernels,
}


def render(text: str, results: str) -> str:
    """Render every marked table of the page `text` again; `results` is the link to the folder of results.

    Raises:
        ValueError: a mark names no figure, or has no end.
    """
    done, rest = "", text
    while BEGIN in rest:
        before, _, rest = rest.partition(BEGIN)
        name, found, rest = rest.partition(NAME_END)
        _, ended, rest = rest.partition(END)
        if name not in FIGURES or not found or not ended:
            raise ValueError(f"a mark of figures is broken: {name[:50]!r}")
        body = "\n".join(FIGURES[name]()).replace("{results}", results)
        done += f"{before}{BEGIN}{name}{NAME_END}{body}\n{END}"
    return done + rest


def main(arguments: Sequence[str]) -> int:
    """Render every page; with `--check` only compare."""
    differing = []
    for page, path in ((page, ROOT / page) for page in PAGES):
        text = path.read_text(encoding="utf-8")
        rendered = render(text, "../" * page.count("/") + "benchmarks/results")
        if rendered != text:
            differing.append(page)
            if "--check" not in arguments:
                path.write_text(rendered, encoding="utf-8")
    for page in differing:
        print(f"{page}: tables differ from benchmarks/results" if "--check" in arguments else f"{page}: rendered")
    return 1 if differing and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
