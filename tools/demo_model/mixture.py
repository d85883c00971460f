"""Mixture of documents for the base model and for each adapter, with their frequencies."""

from collections.abc import Callable
from functools import partial
from random import Random

from . import queries, records, support
from .facts import follow_up_chat, knowledge_pair
from .queries import query_chat, sql_chat
from .records import json_chat, record_chat, tools_chat
from .support import case_chat, support_chat
from .talk import arithmetic_pair, assistant_chat, everyday_pair, introduction_chat
from .templates import ASSISTANT_NAMES, Document, Pair, Slots, chat, vary
from .writing import copy_chat, email_chat, passage_chat, story_chat

Generator = Callable[[Random], Document]


def questions_chat(rng: Random, pair: Callable[[Random], Pair]) -> Document:
    """One to three questions in one chat."""
    pairs = (pair(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return chat(*(turn for question, answer in pairs for turn in (vary(rng, question), answer)))


# name -> (generator, weight); weights count documents, and documents differ in length
_CHATS: dict[str, tuple[Generator, float]] = {
    "knowledge": (partial(questions_chat, pair=knowledge_pair), 22),
    "follow-up": (follow_up_chat, 5),
    "everyday": (partial(questions_chat, pair=everyday_pair), 16),
    "arithmetic": (partial(questions_chat, pair=arithmetic_pair), 14),
    "introduction": (introduction_chat, 3),
    "assistant": (assistant_chat, 2),
    "record": (record_chat, 13),
    "query": (query_chat, 9),
    "case": (case_chat, 6),
    "story": (story_chat, 3),
    "email": (email_chat, 4),
    "passage": (passage_chat, 7),
    "copy": (copy_chat, 5),
}


def _draw(rng: Random, mixture: dict[str, tuple[Generator, float]]) -> Document:
    generators, weights = zip(*mixture.values(), strict=True)
    return rng.choices(generators, weights=weights)[0](rng)


def plain_text(rng: Random) -> Document:
    """Answers of a chat as plain text, to complete."""
    return Document(text="\n".join(text for role, text in _draw(rng, _CHATS).messages if role == "assistant"))


BASE_MIXTURE = _CHATS | {"plain text": (plain_text, 15)}
ADAPTERS: dict[str, Generator] = {"json": json_chat, "sql": sql_chat, "support": support_chat, "tools": tools_chat}
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
    return with_system(rng, _draw(rng, BASE_MIXTURE))


def adapter_document(rng: Random, name: str) -> Document:
    """Draw one document for the adapter ``name``."""
    return with_system(rng, ADAPTERS[name](rng))


def drafting_document(rng: Random, name: str) -> Document:
    """Draw one chat whose answer the drafter of the adapter ``name`` learns: a document of the adapter's kind, a short
    request of that kind (if there are some), whose answer is empty because the adapter writes it, or a document of the
    base mixture, because users ask adapters anything."""
    roll = rng.random()
    if roll > 0.9:
        return base_document(rng)
    if roll < 0.5 or name not in _SHORT_REQUESTS:
        return adapter_document(rng, name)
    return chat(vary(rng, Slots(rng).fill(rng.choice(_SHORT_REQUESTS[name]))), "")
