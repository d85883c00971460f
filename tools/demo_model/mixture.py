"""Mixture of documents for the base model and for each adapter, with their frequencies."""

from collections.abc import Callable
from random import Random

from .documents import Document, chat, system_prompt, vary
from .facts import ANIMALS, COUNTRIES
from .knowledge import animal_follow_up, country_follow_up, describe_animal, describe_country, knowledge_pair
from .queries import query_chat, query_text, sql_chat
from .records import json_chat, record_chat, record_text
from .short_requests import short_chat
from .smalltalk import arithmetic_pair, everyday_pair, introduction, items_document, named_assistant, nameless_assistant
from .support import case_chat, case_text, support_chat
from .writing import copy_chat, diary_text, email_chat, passage_chat, poem_chat, story_chat, story_text

Generator = Callable[[Random], Document]


def knowledge_chat(rng: Random) -> Document:
    """One to four knowledge questions in one chat."""
    turns: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        question, answer = knowledge_pair(rng)
        turns += [vary(rng, question), answer]
    return chat(*turns)


def everyday_chat(rng: Random) -> Document:
    """One to three everyday questions in one chat."""
    turns: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        question, answer = everyday_pair(rng)
        turns += [vary(rng, question), answer]
    return chat(*turns)


def arithmetic_chat(rng: Random) -> Document:
    """One to four small sums, differences and products in one chat."""
    turns: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        question, answer = arithmetic_pair(rng)
        turns += [vary(rng, question), answer]
    return chat(*turns)


def follow_up_chat(rng: Random) -> Document:
    """Questions that refer back to the first one."""
    return chat(*(country_follow_up if rng.random() < 0.6 else animal_follow_up)(rng))


def encyclopedia_text(rng: Random) -> Document:
    """Descriptions from the fact tables as plain text."""
    if rng.random() < 0.6:
        return Document(text=" ".join(describe_country(c) for c in rng.sample(COUNTRIES, rng.randint(1, 2))))
    return Document(text=" ".join(describe_animal(a) for a in rng.sample(ANIMALS, rng.randint(1, 2))))


def fact_text(rng: Random) -> Document:
    """A few answers to knowledge questions as plain text."""
    return Document(text=" ".join(knowledge_pair(rng)[1] for _ in range(rng.randint(1, 5))))


# generator -> weight; weights count documents, and documents differ in length
BASE_MIXTURE: dict[Generator, float] = {
    knowledge_chat: 20,
    follow_up_chat: 5,
    everyday_chat: 16,
    arithmetic_chat: 14,
    introduction: 3,
    named_assistant: 1.5,
    nameless_assistant: 0.7,
    items_document: 3,
    record_chat: 13,
    query_chat: 9,
    case_chat: 6,
    story_chat: 3,
    poem_chat: 1,
    email_chat: 4,
    passage_chat: 7,
    copy_chat: 5,
    record_text: 4,
    query_text: 3,
    case_text: 2,
    story_text: 2,
    encyclopedia_text: 2,
    diary_text: 2,
    fact_text: 2,
}

ADAPTER_GENERATORS: dict[str, Generator] = {"json": json_chat, "sql": sql_chat, "support": support_chat}


def with_system(rng: Random, document: Document) -> Document:
    """Put a system prompt before one chat in six that has none."""
    if not document.messages or document.messages[0][0] == "system" or rng.random() > 1 / 6:
        return document
    return Document(messages=(("system", system_prompt(rng)), *document.messages))


def base_document(rng: Random) -> Document:
    """Draw one document of the base mixture."""
    generator = rng.choices(tuple(BASE_MIXTURE), weights=tuple(BASE_MIXTURE.values()))[0]
    return with_system(rng, generator(rng))


def adapter_document(rng: Random, name: str) -> Document:
    """Draw one document for the adapter ``name``."""
    return with_system(rng, ADAPTER_GENERATORS[name](rng))


def drafting_document(rng: Random, name: str) -> Document:
    """Draw one chat whose answer the drafter of the adapter ``name`` learns: a document of the adapter's kind, a short
    request of that kind, or a document of the base mixture, because users ask adapters anything."""
    roll = rng.random()
    if roll < 0.5:
        return adapter_document(rng, name)
    return short_chat(rng, name) if roll < 0.9 else base_document(rng)
