"""Measurements of the finished models with the engine: exact answers, right form, and acceptance of each drafter."""

import json
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ... import LLM, LoRARequest, SamplingParams
from ...models.checkpoint.tokenizer import load_tokenizer
from .config import RANKS, SEED, Demo
from .mixture import adapter_document, base_document
from .queries import SCHEMA
from .support import CLOSING
from .templates import Document

DRAFT_LENGTH = 4
HELD_OUT = 60
MAX_TOKENS = 160
HELD_OUT_SEED = SEED + 1_000_000  # no stage uses it


class Question(NamedTuple):
    """A held-out chat up to its last answer, as tokens, and that answer."""

    prompt: list[int]
    answer: str


def held_out(model: Path, draw: Callable[[Random], Document], count: int, seed: int = HELD_OUT_SEED) -> list[Question]:
    """Draw chats with a seed that no training stage uses."""
    tokenizer, rng = load_tokenizer(model), Random(seed)
    questions: list[Question] = []
    while len(questions) < count:
        document = draw(rng)
        if document.messages:
            messages = [{"role": role, "content": content} for role, content in document.messages]
            text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
            questions.append(Question(tokenizer.encode(text, add_special_tokens=False), messages[-1]["content"]))
    return questions


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def runs_as_sql(text: str) -> bool:
    """Return whether the text is a query that runs against the schema."""
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(SCHEMA)
        try:
            connection.execute(text)
        except sqlite3.Error:
            return False
    return text.startswith("SELECT")


def _has_support_tone(text: str) -> bool:
    return text.endswith(CLOSING) and ("Thank you" in text or "welcome" in text)


def _calls_or_talks(text: str) -> bool:
    return "<tool_call>" not in text or _is_json(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))


CHECKS: dict[str, Callable[[str], bool]] = {
    "json": _is_json,
    "sql": runs_as_sql,
    "support": _has_support_tone,
    "tools": _calls_or_talks,
}


class Measured(NamedTuple):
    """Answers of a model, or of an adapter, to held-out questions."""

    acceptance_length: float
    """Mean tokens of a verification: accepted drafts and one more."""
    exact: float
    """Share of the answers that are the generator's, letter by letter."""
    valid: float
    """Share of the answers in the adapter's form; 1 for the base."""


def measure(
    llm: LLM,
    questions: list[Question],
    name: str = "base",
    lora: LoRARequest | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Measured:
    """Answer the questions greedily and count accepted drafts."""

    def totals() -> tuple[int, int]:
        counts = [entry.counts for entry in llm.stats().speculation]
        return sum(c.num_verifications for c in counts), sum(c.num_accepted_tokens for c in counts)

    before = totals()
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompts: Any = [{"prompt_token_ids": question.prompt} for question in questions]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params, lora, use_tqdm=False)]
    rounds, accepted = (after - first for after, first in zip(totals(), before, strict=True))
    exact = sum(text == question.answer for text, question in zip(texts, questions, strict=True))
    valid = sum(CHECKS.get(name, bool)(text) for text in texts)
    return Measured(1 + accepted / max(1, rounds), exact / len(texts), valid / len(texts))


def evaluate(demo: Demo) -> None:
    """Measure the base model and every adapter with every drafter, and write `evaluation.json` into the work folder."""
    found: dict[str, dict[str, Any]] = {}
    max_tokens = demo.scaled(MAX_TOKENS, least=16)
    for method, drafter in demo.drafters.items():
        config = {"method": method, "model": str(drafter), "num_speculative_tokens": DRAFT_LENGTH}
        with LLM(str(demo.base), dtype="bfloat16", enable_lora=True, speculative_config=config) as llm:
            for name in ("base", *RANKS):
                draw = base_document if name == "base" else partial(adapter_document, name=name)
                lora = None if name == "base" else LoRARequest(name, path=str(demo.adapter(name)))
                questions = held_out(demo.base, draw, demo.scaled(HELD_OUT, least=8))
                found.setdefault(method, {})[name] = measure(llm, questions, name, lora, max_tokens)._asdict()
    text = json.dumps(found, indent=1)
    (demo.work / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    print(text)
