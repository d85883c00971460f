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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/benchmarks.md")
BEGIN, NAME_END, END = "<!-- figures: ", " -->\n", "<!-- end -->"

Row = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """Load a result file by its name without `.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def number(value: float | None) -> str:
    """Text of a ratio with two digits; empty without a measurement."""
    return "" if value is None else f"{value:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def source(*names: str) -> str:
    """One line with date, commit and machine of the results."""
    machines: dict[str, None] = {}
    files: dict[str, list[str]] = {}
    for name in names:
        machine = load(name)["machine"]
        features = machine["capability"] + (" with AMX" if machine.get("amx") else "")
        machines[f"{machine['cpu']} ({features}), {machine['threads']} of {machine['cores']} cores"] = None
        when = f"{machine['date']}, commit {machine['commit']}"
        files.setdefault(when, []).append(f"[{name}]({{results}}/{name}.json)")
    return f"{', '.join(machines)}. " + "; ".join(f"{when}: {', '.join(links)}" for when, links in files.items()) + "."


# --- Other engines ------------------------------------------------------------------------------------------


def ratio(results: Sequence[str], key: tuple[str, str, str], requests: int) -> float | None:
    """Ratio of output tokens/s for `key` = (mode, engine, peer), from the first result that has it."""
    for name in results:
        for row in load(name)["ratios"]:
            if (row["mode"], row["engine"], row["peer"], row["requests"]) == (*key, requests):
                return row["ratio"]
    return None


def peers() -> list[str]:
    """Table of output tokens/s over those of other engines."""
    small = ("peers-27M", "peers-27M-transformers", "peers-27M-openvino")
    medium = ("peers-494M-base", "peers-494M-lora", "peers-494M-ngram")
    kinds = {
        "vLLM, base": ("base", "outrider", "vllm"),
        "vLLM, 8 adapters in the batch": ("lora", "outrider", "vllm"),
        "vLLM, n-gram, 4 drafts": ("ngram", "outrider", "vllm"),
        "vLLM, n-gram (Outrider adaptive)": ("ngram", "outrider-adaptive", "vllm"),
        "transformers + PEFT, base": ("base", "outrider", "transformers"),
        "transformers + PEFT, 8 adapters": ("lora", "outrider", "transformers"),
        "OpenVINO GenAI, base": ("base", "outrider", "openvino"),
        "OpenVINO GenAI, 8 adapters (one call each)": ("lora", "outrider", "openvino"),
    }
    rows = [
        [label, *(number(ratio(results, key, n)) for results in (small, medium) for n in (1, 8, 32))]
        for label, key in kinds.items()
    ]
    head = ["Outrider over", "27M: 1 request", "8", "32", "494M: 1", "8", "32"]
    return [*table(head, rows), "", source(*small, *medium)]


# --- Adapters, products, prompts ----------------------------------------------------------------------------


def lora() -> list[str]:
    """Table of output tokens/s with adapters over an engine without them: medians of the rounds' ratios."""
    names = {"27M": "lora-27M", "494M": "lora-494M"}

    def cell(name: str, batch: int) -> str:
        rows = [row for row in load(name)["rows"] if row["batch_size"] == batch]
        (base,) = (row["rounds"] for row in rows if row["num_adapters"] is None)
        (eight,) = (row["rounds"] for row in rows if row["num_adapters"] == 8)
        by_round = {entry["round"]: entry["output_throughput"] for entry in base}
        return number(median(entry["output_throughput"] / by_round[entry["round"]] for entry in eight))

    rows = [[f"{model}, 8 adapters", *(cell(name, n) for n in (1, 8, 32))] for model, name in names.items()]
    return [*table(["requests at once", "1", "8", "32"], rows), "", source(*names.values())]


def ceilings() -> list[str]:
    """Table of the share of the nearer hardware limit that a step's products reach."""
    names = {"27M": "cpu-ceilings-27M", "494M": "cpu-ceilings-494M"}
    rows = []
    for model, name in names.items():
        result = load(name)
        shares = [number(product["of_the_ceiling"]) for product in result["products"]]
        limits = [f"{result[key]:.0f}" for key in ("read_gigabytes_per_second", "register_gigamacs_per_second")]
        rows.append([model, *shares, *limits])
    head = ["rows", *(str(product["rows"]) for product in load("cpu-ceilings-27M")["products"])]
    return [*table([*head, "memory, GB/s", "multiply-adds, billions/s"], rows), "", source(*names.values())]


def long_prompts() -> list[str]:
    """Table of the inter-token latency of streams while long prompts arrive."""
    names = ("long-prompts-27M", "long-prompts-494M")
    prefix = [load(name)["shared_prefix"] for name in names]
    beside = [load(name)["interference"] for name in names]

    def pair(part: Row, first: str, second: str, scale: float = 1.0, digits: int = 2) -> str:
        return f"{part[first] * scale:.{digits}f}, {part[second] * scale:.{digits}f}"

    rows = [
        [
            "TTFT with a cached prefix over the first one's: median, worst",
            *(pair(p, "median_ratio", "max_ratio") for p in prefix),
        ],
        ["ITL of 8 streams alone, ms: median, p99", *(pair(b, "alone_median", "alone_p99", 1e3, 1) for b in beside)],
        [
            "ITL while long prompts arrive, ms: median, p99",
            *(pair(b, "beside_median", "beside_p99", 1e3, 1) for b in beside),
        ],
        ["TTFT of the long prompts, s", *(f"{b['long_ttft_median']:.1f}" for b in beside)],
    ]
    return [*table(["", "27M", "494M"], rows), "", source(*names)]


# --- Speculation --------------------------------------------------------------------------------------------


def speculation_row(name: str, task: str, kind: str, mode: str, batch: int = 1) -> Row | None:
    """One measured cell of `outrider bench speculation`; None where the result has none."""
    for row in load(name)["rows"]:
        if (row["task"], row["kind"], row["mode"], row["batch_size"]) == (task, kind, mode, batch):
            return row
    return None


def speculation_adapters() -> list[str]:
    """Table of speed-up and acceptance length of the base model and of adapters, one request at a time."""
    names = ("speculation-494M-adapters", "speculation-494M-adapters-6-drafts")
    tasks = [("base", "base model")]
    tasks += [(task, kind) for task in ("json", "sql", "support") for kind in ("with draft weights", "without")]

    def cell(name: str, task: str, kind: str, mode: str) -> str:
        kind = "without draft weights" if kind == "without" else kind
        row = speculation_row(name, task, kind, mode)
        return "" if row is None else f"{row['speedup']:.2f} ({row['acceptance_length']:.2f})"

    rows = [
        [
            "base" if task == "base" else f"`{task}`, {kind}",
            *(cell(name, task, kind, mode) for name in names for mode in ("draft_model", "eagle3")),
        ]
        for task, kind in tasks
    ]
    head = ["", "draft model, 4 drafts", "EAGLE-3, 4 drafts", "draft model, 6", "EAGLE-3, 6"]
    return [*table(head, rows), "", source(*names)]


def by_batch_size(few: str, many: str, modes: dict[str, str]) -> list[str]:
    """Table of speed-up by mode and number of requests: 1 and 4 from the result `few`, 16 and 32 from `many`."""
    texts = ("base", "random")
    sizes = (1, 4, 16, 32)

    def cell(text: str, mode: str, size: int) -> str:
        for name in (few, many) if size <= 4 else (many, few):
            for row in load(name)["rows"]:
                if (row["mode"], row["batch_size"]) == (mode, size) and (row["task"] == "base") == (text == "base"):
                    return number(row["speedup"])
        return ""

    rows = [[label, *(cell(text, mode, n) for text in texts for n in sizes)] for mode, label in modes.items()]
    head = ["", "1 request", "4", "16", "32", "random text: 1", "4", "16", "32"]
    return [*table(head, rows), "", source(few, many)]


def speculation_batches() -> list[str]:
    """Table of speed-up by number of requests, on the 494M model."""
    modes = {
        "control": "control (a second engine without speculation)",
        "draft_model": "draft model, 4 drafts",
        "eagle3": "EAGLE-3, 4 drafts",
        "adaptive": "adaptive (EAGLE-3)",
    }
    return by_batch_size("speculation-494M-batches", "speculation-494M-batches-16-32", modes)


def speculation_demo() -> list[str]:
    """Table of speed-up by number of requests, on the embedded demo model."""
    modes = {
        "control": "control",
        "draft_model": "draft model, 4 drafts",
        "eagle3": "EAGLE-3, 4 drafts",
        "adaptive": "adaptive (draft model)",
        "adaptive:eagle3": "adaptive (EAGLE-3), as `make serve` runs it",
    }
    return by_batch_size("speculation-demo", "speculation-demo-16-32", modes)


FIGURES: dict[str, Callable[[], list[str]]] = {
    "peers": peers,
    "lora": lora,
    "ceilings": ceilings,
    "long-prompts": long_prompts,
    "speculation-adapters": speculation_adapters,
    "speculation-batches": speculation_batches,
    "speculation-demo": speculation_demo,
}


def render(text: str, results: str) -> str:
    """Render every marked table of the page `text` anew; `results` is the link to the folder of results.

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
    for page in PAGES:
        path = ROOT / page
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
