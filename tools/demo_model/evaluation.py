"""Measurements of the finished models: exact answers, valid JSON and SQL, and draft acceptance."""

import json
import sqlite3
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from .adapters import load_adapted
from .config import ADAPTER_PLANS, SEED
from .documents import Document
from .folders import DemoFolders, load_model
from .mixture import BASE_MIXTURE, adapter_document, base_document
from .queries import SCHEMA
from .support import CLOSING
from .tokenizer import load_tokenizer

DRAFT_LENGTH = 4
MAX_NEW_TOKENS = 160
PROMPTS = 60  # per model
HELD_OUT_SEED = SEED + 1_000_000  # no stage uses it


class Question(NamedTuple):
    """A held-out chat up to its last answer, as tokens, and that answer."""

    messages: list[dict[str, str]]
    prompt: list[int]
    answer: str


class Reply(NamedTuple):
    """A greedy continuation: all tokens with the one that ends it, and the text."""

    tokens: list[int]
    text: str


def ask(tokenizer: PreTrainedTokenizerFast, document: Document) -> Question:
    """Cut the last answer off a chat."""
    messages = [{"role": role, "content": content} for role, content in document.messages]
    text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    return Question(messages[:-1], tokenizer.encode(text, add_special_tokens=False), messages[-1]["content"])


def held_out(
    tokenizer: PreTrainedTokenizerFast, draw: Callable[[Random], Document], count: int, seed: int = HELD_OUT_SEED
) -> list[Question]:
    """Draw chats with a seed that no training stage uses."""
    rng = Random(seed)
    questions: list[Question] = []
    while len(questions) < count:
        document = draw(rng)
        if document.messages:
            questions.append(ask(tokenizer, document))
    return questions


@torch.inference_mode()
def greedy(model: nn.Module, tokenizer: PreTrainedTokenizerFast, prompt: list[int]) -> Reply:
    """Return the greedy continuation of a prompt."""
    ids = torch.tensor([prompt])
    generate: Any = model.generate
    output = generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS
    )
    tokens = output[0, len(prompt) :].tolist()
    return Reply(tokens, str(tokenizer.decode(tokens, skip_special_tokens=True)))


@torch.inference_mode()
def draft_matches(draft: nn.Module, prompt: list[int], tokens: list[int]) -> list[bool]:
    """Return for each token whether the draft model, having read everything before it, would have guessed it."""
    logits = draft(input_ids=torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return (logits.argmax(-1) == torch.tensor(tokens)).tolist()


def accepted_per_round(matches: list[bool], k: int = DRAFT_LENGTH) -> list[int]:
    """Return how many of ``k`` drafts each verification round accepts.

    A round starts after the tokens of the rounds before it, accepts drafts up to the first wrong one, and adds one
    token of the target. Since accepted drafts equal the target's tokens, guesses made on the target's text suffice.
    """
    rounds: list[int] = []
    start = 0
    while start < len(matches):
        window = matches[start : start + k]
        accepted = window.index(False) if False in window else len(window)
        rounds.append(accepted)
        start += accepted + 1
    return rounds


def acceptance_length(rounds: list[int]) -> float:
    """Return the mean number of tokens a round yields."""
    return 1 + sum(rounds) / len(rounds)


def is_json(text: str) -> bool:
    """Return whether the text is one JSON object."""
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


def has_support_tone(text: str) -> bool:
    """Return whether the text thanks the customer and closes politely."""
    return text.endswith(CLOSING) and ("Thank you" in text or "welcome" in text)


CHECKS: dict[str, Callable[[str], bool]] = {"json": is_json, "sql": runs_as_sql, "support": has_support_tone}


class Measured(NamedTuple):
    """One model on its held-out questions."""

    exact: float  # fraction of answers equal to the expected ones
    valid: float  # fraction of answers in the adapter's form; 1 for the base
    acceptance: dict[str, float]  # acceptance length by draft model
    mean_tokens: float


def measure(
    model: nn.Module,
    drafts: Mapping[str, nn.Module],
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    check: Callable[[str], bool],
) -> Measured:
    """Answer the questions greedily, and see how well each draft model guesses the answers."""
    replies = [greedy(model, tokenizer, question.prompt) for question in questions]
    rounds: dict[str, list[int]] = {name: [] for name in drafts}
    for question, reply in zip(questions, replies, strict=True):
        for name, draft in drafts.items():
            rounds[name] += accepted_per_round(draft_matches(draft, question.prompt, reply.tokens))
    pairs = list(zip(questions, replies, strict=True))
    return Measured(
        exact=sum(question.answer == reply.text for question, reply in pairs) / len(pairs),
        valid=sum(check(reply.text) for reply in replies) / len(replies),
        acceptance={name: acceptance_length(values) for name, values in rounds.items()},
        mean_tokens=sum(len(reply.tokens) for reply in replies) / len(replies),
    )


SAMPLES = {
    "base": [
        "What is the capital of Portugal?",
        "Tell me about the otter.",
        "Anna from Lisbon ordered 3 green lamps for 42 euros.",
        "How do I make tea?",
        "Write a short email to Maria: we meet on Friday at 10:00 in the library about the budget.",
        "Explain speculative decoding.",
    ],
    "json": [
        "Anna from Lisbon ordered 3 green lamps for 42 euros.",
        "On Monday at 14:30 there is a meeting with Omar in room 7 about the design review.",
        "What is the capital of Portugal?",
    ],
    "sql": [
        "Show all customers from Lisbon.",
        "How many orders that are shipped do we have?",
        "List the five most expensive products.",
        "What is the total of all orders of Anna?",
    ],
    "support": [
        "Hi, my name is Anna. My order 4821 with the green lamp has not arrived.",
        "I ordered a blue kettle but got a red mug. The order number is 7310.",
        "What is the capital of Portugal?",
    ],
}


def sample_answers(model: nn.Module, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[tuple[str, str]]:
    """Return greedy answers to single questions."""
    answers = []
    for prompt in prompts:
        question = ask(tokenizer, Document(messages=(("user", prompt), ("assistant", ""))))
        answers.append((prompt, greedy(model, tokenizer, question.prompt).text))
    return answers


def exact_by_topic(model: nn.Module, tokenizer: PreTrainedTokenizerFast, count: int = 25) -> dict[str, float]:
    """Return the base model's fraction of exact answers for each chat generator."""
    result = {}
    for generator in BASE_MIXTURE:
        if not generator(Random(0)).messages:
            continue
        questions = held_out(tokenizer, generator, count)
        right = sum(greedy(model, tokenizer, q.prompt).text == q.answer for q in questions)
        result[generator.__name__] = right / count
    return result


def evaluate(folders: DemoFolders) -> dict[str, Any]:
    """Measure the base model and every adapter, with the plain draft model and with the adapter's own."""
    tokenizer = load_tokenizer(folders.base)
    base, draft = load_model(folders.base), load_model(folders.draft)
    questions = held_out(tokenizer, base_document, 2 * PROMPTS)
    measured = measure(base, {"draft": draft}, tokenizer, questions, lambda text: True)
    results: dict[str, Any] = {
        "base": measured._asdict() | {"samples": sample_answers(base, tokenizer, SAMPLES["base"])},
        "topics": exact_by_topic(base, tokenizer),
    }
    for name in ADAPTER_PLANS:
        adapted = load_adapted(folders.base, folders.adapter(name)).eval()
        drafts: dict[str, nn.Module] = {
            "draft": draft,
            "own": load_adapted(folders.draft, folders.draft_adapter(name, "draft_model")).eval(),
        }
        questions = held_out(tokenizer, partial(adapter_document, name=name), PROMPTS)
        measured = measure(adapted, drafts, tokenizer, questions, CHECKS[name])
        results[name] = measured._asdict() | {"samples": sample_answers(adapted, tokenizer, SAMPLES[name])}
    return results
