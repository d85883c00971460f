"""The model card, written from the logs of the stages and the measurements of the evaluation."""

import json
from pathlib import Path
from typing import Any

from .config import (
    ADAPTER_PLANS,
    BASE_SCHEDULE,
    BASE_SHAPE,
    DRAFT_LORA_PLANS,
    DRAFT_SCHEDULE,
    DRAFT_SHAPE,
    HEAD_PLAN,
    MAX_POSITION,
    SEED,
    VOCAB_SIZE,
    ModelShape,
    Schedule,
)
from .evaluation import DRAFT_LENGTH, PROMPTS
from .facts import ANIMALS, COUNTRIES, ELEMENTS, INVENTIONS, PLANETS
from .folders import DemoFolders, load_model
from .guides import DEFINITIONS, HOWTOS
from .heads import head_measurements
from .queries import SCHEMA
from .training import count_parameters, last_loss

_INTRO = """\
# Model card: outrider-demo

A very small Llama-shape chat model with its draft model, its EAGLE-3 head and three LoRA adapters. It exists so that
everything Outrider does (speculative decoding, many adapters at once, adapter-aware drafting) can be tried at once, on
any computer, without a download. It is no source of knowledge: it knows a few tables of facts and a few dozen kinds of
request, and says that it does not know when a name is new to it.

Everything here is made by one command, `python tools/demo_model`, from text which that command generates.
No other text or model is used.
"""

# this holds for the shipped weights; remove it when a fresh run of the recipe replaces them
_RUN = """\
## The shipped run

The shipped weights were trained while the recipe was being written, in stretches: the base to step 1,400 on a schedule
that would have ended at 3,200 steps, with sums up to 30 and lists of examples in random order; then to 2,000 and to
2,400 on schedules that ended there (with rows of 1,024 tokens alone from 1,920 to 2,000); then to 3,000 with more and
smaller sums. The draft was trained for 800 steps against the base of step 2,400 and for 400 more against the final
one. The tokenizer is from before those edits. The first 466 steps of the EAGLE-3 head ran on a schedule that would have
ended at 2,000. The LoRA of the draft model for `sql` was trained for 3,000 steps. A fresh run follows the recipe
throughout and gives a model of the same kind, not the same bits.
"""

_DATA = """\
## Data

Each training document is drawn by a seeded generator; the seed of a training step follows from the seed of the stage
and the number of the step, so a stage can be interrupted and gives the same batches when it goes on. No document
is stored. The generators:

- facts: {countries} countries, {animals} animals, {planets} planets, {elements} elements, {inventions} works and inventions, in several phrasings, with
  follow-up questions ("And the currency?"), yes/no checks, lists, comparisons, and invented names to which the
  right answer is that they are unknown;
- everyday questions: small arithmetic, totals of a purchase, counting, {howtos} how-to lists, {definitions} definitions, small talk;
- the user's own words: introductions that are asked for later, records (orders, meetings, flights, ...), passages to
  summarise or to answer questions about, exact repetition, emails, lists. A quarter of all names are invented, so that
  copying from the prompt must be learned;
- stories, poems and plain texts;
- requests over a small shop database and messages of a shop's customers. The base model answers them in plain prose,
  and in SQL, JSON or an agent's tone only when asked ("Turn this into SQL: ..."). The adapters do so by default.

The database of the SQL requests:

```sql
{schema}
```

The chat format is `<|user|>`, newline, text, `<|end|>`, newline, `<|assistant|>`, newline, with an optional
`<|system|>` message first and `<|bos|>` at the start. An answer ends with `<|end|>`. The tokenizer is a byte-level BPE
with {vocab} tokens and one token a digit, so every string survives a round trip.
"""


COUNTS = {
    "countries": len(COUNTRIES),
    "animals": len(ANIMALS),
    "planets": len(PLANETS),
    "elements": len(ELEMENTS),
    "inventions": len(INVENTIONS),
    "howtos": len(HOWTOS),
    "definitions": len(DEFINITIONS),
}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shape(shape: ModelShape) -> str:
    return (
        f"{shape.layers} layers, hidden {shape.hidden}, intermediate {shape.intermediate}, "
        f"{shape.heads} query and {shape.kv_heads} KV heads of {shape.head_dim}"
    )


def _tokens(schedule: Schedule) -> str:
    return f"{schedule.steps * schedule.rows * schedule.length / 1e6:.1f} million"


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _models(folders: DemoFolders) -> str:
    rows = []
    parts = (("base", BASE_SHAPE, BASE_SCHEDULE), ("draft", DRAFT_SHAPE, DRAFT_SCHEDULE))
    for name, shape, schedule in parts:
        folder = folders.output / name
        rows.append(
            [
                name,
                _shape(shape),
                f"{count_parameters(load_model(folder)):,}",
                str(schedule.steps),
                _tokens(schedule),
                f"{last_loss(folders.work / name):.3f}",
                f"{folder_bytes(folder) / 1e6:.1f} MB",
            ]
        )
    header = ["model", "shape", "parameters", "steps", "tokens", "final loss", "size"]
    return table(header, rows)


def _adapters(folders: DemoFolders) -> str:
    rows = []
    for name, plan in ADAPTER_PLANS.items():
        rows.append(
            [
                name,
                str(plan.rank),
                f"{plan.schedule.steps}",
                _tokens(plan.schedule),
                f"{last_loss(folders.work / name):.3f}",
                f"{folder_bytes(folders.adapter(name)) / 1e6:.2f} MB",
            ]
        )
    header = ["adapter", "rank", "steps", "tokens", "final loss", "size"]
    return table(header, rows)


def _head(folders: DemoFolders) -> str:
    config = json.loads((folders.eagle3 / "config.json").read_text())
    layers = ", ".join(str(layer) for layer in config["eagle_aux_hidden_state_layer_ids"])
    return (
        "## EAGLE-3 head\n\n"
        f"`eagle3/`: one layer of hidden size {config['hidden_size']} and intermediate size "
        f"{config['intermediate_size']}, {folder_bytes(folders.eagle3) / 1e6:.1f} MB, that reads what enters the base "
        f"model's layers {layers} and shares the base model's embeddings and lm_head. `outrider train-draft` distilled it "
        f"from the base model's own greedy answers to {HEAD_PLAN.prompts:,} generated chats, in {HEAD_PLAN.steps} steps of "
        f"{HEAD_PLAN.batch_tokens} tokens, going on from its own output for four positions; it began as the base model's last "
        "layer. Each adapter also holds `draft/eagle3/`, a LoRA for the head, made as that for the draft model.\n"
    )


def _acceptance(folders: DemoFolders, results: dict[str, Any]) -> str:
    rows = []
    for name in ("base", *ADAPTER_PLANS):
        measured = results[name]
        own = measured["acceptance"].get("own")
        first, last = head_measurements(folders, name)
        plain, adapted = (last, None) if name == "base" else (first, last)
        rows.append(
            [
                "none" if name == "base" else name,
                f"{measured['acceptance']['draft']:.2f}",
                "" if own is None else f"{own:.2f}",
                f"{plain['acceptance_length']:.2f}",
                "" if adapted is None else f"{adapted['acceptance_length']:.2f}",
                f"{100 * measured['exact']:.0f} %",
                "" if name == "base" else f"{100 * measured['valid']:.0f} %",
                f"{measured['mean_tokens']:.0f}",
            ]
        )
    drafters = ["draft model", "with its adapter", "EAGLE-3 head", "with its adapter"]
    return table(["adapter", *drafters, "exact answers", "right form", "tokens an answer"], rows)


def _topics(results: dict[str, Any]) -> str:
    rows = [[name.replace("_", " "), f"{100 * value:.0f} %"] for name, value in results["topics"].items()]
    return table(["kind of chat", "exact answers"], rows)


def _samples(results: dict[str, Any]) -> str:
    parts = []
    for name in ("base", *ADAPTER_PLANS):
        title = "Base model" if name == "base" else f"Adapter `{name}`"
        shown = "\n\n".join(f"> {prompt}\n\n```\n{answer}\n```" for prompt, answer in results[name]["samples"])
        parts.append(f"### {title}\n\n{shown}")
    return "\n\n".join(parts)


def model_card(folders: DemoFolders, results: dict[str, Any]) -> str:
    """Return the model card as Markdown."""
    lengths = " and ".join(str(length) for length in BASE_SCHEDULE.long_lengths)
    long = f"every other of the last {BASE_SCHEDULE.long_steps} steps of the base on rows of {lengths}"
    total = sum(folder_bytes(folders.output / part) for part in ("base", "draft", "eagle3", "adapters"))
    lora = DRAFT_LORA_PLANS["json"]
    sections = [
        _INTRO,
        _DATA.format(schema=SCHEMA, vocab=VOCAB_SIZE, **COUNTS),
        f"## Models\n\n{_models(folders)}\n\nAll weights are bfloat16, with tied embeddings and at most {MAX_POSITION} "
        f"positions; trained in float32 with bfloat16 autocast on rows of {BASE_SCHEDULE.length} tokens, {long}. "
        "Muon trains the matrices of the layers, AdamW the rest; the rates fall linearly to zero. What the user writes "
        "counts a tenth in the loss. The draft model is distilled: its target is the base model's distribution on the "
        f"same kind of text, and its loss is the cross entropy against it. Seed {SEED}.\n",
        _RUN,
        f"## Adapters\n\n{_adapters(folders)}\n\nTrained with PEFT on all linear projections, alpha twice the rank. Each "
        f"folder also holds `draft/draft_model/`, a LoRA of rank {lora.rank} for the draft model, so that the draft guesses what "
        f"the adapter says: `outrider train-draft` distilled it from the adapted base's answers to {lora.prompts:,} chats in "
        f"{lora.steps} steps: half of the adapter's own kind, two fifths short requests of that kind without the usual details, "
        "the rest anything else.\n",
        _head(folders),
        f"Everything shipped takes {total / 1e6:.1f} MB.\n",
        f"## Acceptance\n\nMean tokens a verification round yields (accepted drafts and one more) with "
        f"{DRAFT_LENGTH} greedy drafts a round, greedy target, on {2 * PROMPTS} held-out prompts for the base and "
        f"{PROMPTS} for each adapter; {DRAFT_LENGTH + 1} would be perfect. Held out means drawn with a seed that no stage uses: "
        "records, names and passages are new, while a question about a fact also occurs in training. The draft model also "
        "guesses the answer's first token, the head begins after it.\n\n"
        f"{_acceptance(folders, results)}\n",
        "An answer is exact when it equals the generator's answer letter by letter, which stories, lists of examples and "
        f"other free answers cannot be expected to do. By kind of chat, for the base model:\n\n{_topics(results)}\n",
        f"## Samples\n\nGreedy answers.\n\n{_samples(results)}\n",
        "## Limits\n\nEnglish only. Sums, differences and products of numbers up to ten, written with spaces, and nothing beyond. "
        "Requests of other kinds and questions about real things outside its tables get fluent but wrong or meaningless "
        'answers. A rare name is sometimes copied wrongly ("Tavi" became "Tara"), and temperature makes that worse.\n',
    ]
    return "\n".join(sections)
