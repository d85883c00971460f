"""Mixture of documents for the base model and for each adapter, with their frequencies."""

from collections.abc import Callable
from functools import partial
from random import Random

from . import queries, records, support
from .facts import encyclopedia_text, follow_up_chat, knowledge_pair
from .queries import query_chat, query_text, sql_chat
from .records import json_chat, record_chat, record_text
from .support import case_chat, case_text, support_chat
from .talk import arithmetic_pair, assistant_chat, everyday_pair, introduction_chat, list_chat
from .templates import ASSISTANT_NAMES, Document, Pair, Slots, chat, vary
from .writing import copy_chat, diary_text, email_chat, passage_chat, poem_chat, story_chat, story_text

Generator = Callable[[Random], Document]


def questions_chat(rng: Random, pair: Callable[[Random], Pair]) -> Document:
    """One to three questions in one chat."""
    pairs = (pair(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return chat(*(turn for question, answer in pairs for turn in (vary(rng, question), answer)))


# name -> (generator, weight); weights count documents, and documents differ in length
BASE_MIXTURE: dict[str, tuple[Generator, float]] = {
    "knowledge": (partial(questions_chat, pair=knowledge_pair), 22),
    "follow-up": (follow_up_chat, 5),
    "everyday": (partial(questions_chat, pair=everyday_pair), 16),
    "arithmetic": (partial(questions_chat, pair=arithmetic_pair), 14),
    "introduction": (introduction_chat, 3),
    "assistant": (assistant_chat, 2),
    "list": (list_chat, 3),
    "record": (record_chat, 13),
    "query": (query_chat, 9),
    "case": (case_chat, 6),
    "story": (story_chat, 3),
    "poem": (poem_chat, 1),
    "email": (email_chat, 4),
    "passage": (passage_chat, 7),
    "copy": (copy_chat, 5),
    "record text": (record_text, 4),
    "query text": (query_text, 3),
    "case text": (case_text, 2),
    "story text": (story_text, 2),
    "encyclopedia": (encyclopedia_text, 3),
    "diary": (diary_text, 2),
}
ADAPTERS: dict[str, Generator] = {"json": json_chat, "sql": sql_chat, "support": support_chat}
_SHORT_REQUESTS = {
    "json": records.SHORT_REQUESTS,
    "sql": queries.SHORT_REQUESTS,
    "support": support.SHORT_REQUESTS,
}


def with_system(rng: Random, document: Document) -> Document:
    """Put a system prompt, which changes no answer, before one chat in six that has none."""
    if not document.messages or document.messages[0][0] == "system" or rng.random() > 1 / 6:
        return document
    prompt = "You are a [helpful|friendly|concise] assistant.|Be brief and polite.|You are {name}, a helpful assistant."
    system = Slots(rng, {"name": rng.choice(ASSISTANT_NAMES)}).fill(f"[{prompt}]")
    return Document(messages=(("system", system), *document.messages))


def base_document(rng: Random) -> Document:
    """Draw one document of the base mixture."""
    generators, weights = zip(*BASE_MIXTURE.values(), strict=True)
    return with_system(rng, rng.choices(generators, weights=weights)[0](rng))


def adapter_document(rng: Random, name: str) -> Document:
    """Draw one document for the adapter ``name``."""
    return with_system(rng, ADAPTERS[name](rng))


def drafting_document(rng: Random, name: str) -> Document:
    """Draw one chat whose answer the drafter of the adapter ``name`` learns: a document of the adapter's kind, a short
    request of that kind, whose answer is empty because the adapter writes it, or a document of the base mixture,
    because users ask adapters anything."""
    roll = rng.random()
    if roll < 0.5:
        return adapter_document(rng, name)
    if roll > 0.9:
        return base_document(rng)
    return chat(vary(rng, Slots(rng).fill(rng.choice(_SHORT_REQUESTS[name]))), "")
