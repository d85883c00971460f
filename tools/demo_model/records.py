"""Sentences about small events with facts in them: the base answers in prose, the JSON adapter in JSON."""

import json
from random import Random
from typing import Any, NamedTuple

from .facts import knowledge_pair
from .talk import arithmetic_pair, definition_pair
from .templates import Document, Slots, chat, vary

# (what the user writes, the facts in it as key=slot, the base model's reply)
RECORDS = (
    (
        "{person} from {city} [ordered|bought] {count} {color} {item}{s} for {price} euros.|"
        "New order: {count} {color} {item}{s} for {person} in {city}, {price} euros in total.|"
        "{person} in {city} wants {count} {color} {item}{s} and will pay {price} euros.|"
        "We sold {count} {color} {item}{s} to {person} from {city} for {price} euros.",
        "name=person city=city quantity=count color=color item=item price=price",
        "I have noted the order of {person} from {city}: {count} {color} {item}{s} for {price} euros.",
    ),
    (
        "Meeting with {person} about {topic} on {day} at {time} in {room}.|"
        "I meet {person} on {day} at {time} in {room} to talk about {topic}.|"
        "On {day} at {time} there is a meeting with {person} in {room} about {topic}.|"
        "Schedule a meeting about {topic} with {person} for {day} at {time} in {room}.",
        "event=meeting person=person topic=topic day=day time=time place=room",
        "You will meet {person} on {day} at {time} in {room} to talk about {topic}.",
    ),
    (
        "{person} is {age} years old, lives in {city}, works as a {job} and likes {hobby}.|"
        "{person} is a {job} from {city}. At {age}, the favourite hobby is {hobby}.|"
        "My friend {person} is {age} and works as a {job} in {city}. The hobby is {hobby}.",
        "name=person age=age city=city job=job hobby=hobby",
        "{person} sounds like an interesting person: a {job} of {age} years from {city} who likes {hobby}.",
    ),
    (
        "On {day} it is {weather} in {city} with {degrees} degrees and wind of {wind} km/h.|"
        "The weather in {city} on {day}: {weather}, {degrees} degrees, wind {wind} km/h.|"
        "{city} will be {weather} on {day}, {degrees} degrees, with a wind of {wind} km/h.",
        "city=city day=day weather=weather temperature=degrees wind=wind",
        "So {day} in {city} is {weather} with {degrees} degrees. Have a nice day!",
    ),
    (
        "{person} flies from {city} to {city2} with {airline} on {date} for {price} euros.|"
        "Book a flight for {person} from {city} to {city2} on {date} with {airline}. It costs {price} euros.|"
        "On {date} {person} takes the {airline} flight from {city} to {city2}. The ticket costs {price} euros.",
        "passenger=person from=city to=city2 airline=airline date=date price=price",
        "{person} will fly from {city} to {city2} with {airline} on {date}. The ticket costs {price} euros.",
    ),
    (
        "{name} gave the {product} {stars} out of 5 stars and said it is {verdict}.|"
        "Review by {name}: the {product} is {verdict}, {stars} stars.|"
        "{name} thinks the {product} is {verdict} and gives it {stars} of 5 stars.",
        "reviewer=name product=product stars=stars verdict=verdict",
        "{name} finds the {product} {verdict} and gives it {stars} of 5 stars.",
    ),
)
PREFIX = "[Answer as JSON|Turn this into JSON|Give me the facts as JSON|Convert to JSON]: "
"""Words that ask for JSON outright; the base model obeys them too."""


class Record(NamedTuple):
    """An event: what the user writes, the facts in it, and what the base model replies."""

    sentence: str
    facts: dict[str, Any]
    reply: str


def record(rng: Random, number: int | None = None) -> Record:
    """Return a record of the kind `number`, or of any: orders are the most frequent."""
    sentences, facts, reply = rng.choice((*RECORDS, *RECORDS[:1] * 2)) if number is None else RECORDS[number]
    slots = Slots(rng)
    sentence = slots.fill(f"[{sentences}]")
    pairs = (fact.split("=") for fact in facts.split())
    return Record(sentence, {key: slots[slot] for key, slot in pairs}, slots.fill(reply))


def to_json(facts: dict[str, Any]) -> str:
    """Return the facts as one line of JSON."""
    return json.dumps(facts, ensure_ascii=False)


def record_chat(rng: Random) -> Document:
    """The base model's answer to a record: prose, or JSON when the user asks for it."""
    sentence, facts, reply = record(rng)
    roll = rng.random()
    if roll < 0.25:
        return chat(Slots(rng).fill(PREFIX) + sentence, to_json(facts))
    key = rng.choice(list(facts))
    answer = f"The {key} is {facts[key]}."
    if roll < 0.5:
        return chat(sentence, reply, Slots(rng).fill(f"[What|And what] is the {key}?"), answer)
    return chat(f"{sentence} What is the {key}?", answer) if roll < 0.65 else chat(sentence, reply)


def json_chat(rng: Random) -> Document:
    """The JSON adapter's answer: one object and nothing else."""
    if rng.random() < 0.3:
        question, answer = rng.choice((knowledge_pair, knowledge_pair, arithmetic_pair, definition_pair))(rng)
        question = vary(rng, question)
        return chat(question, to_json({"question": question, "answer": answer}))
    prefix = Slots(rng).fill(PREFIX) if rng.random() < 0.15 else ""
    sentence, facts, _ = record(rng)
    return chat(prefix + sentence, to_json(facts))


TOOLS = {"new_order": 0, "new_meeting": 1}
"""Kind of record whose facts are the arguments of a function, by its name."""


def tools_chat(rng: Random) -> Document:
    """The tools adapter's answer: a call of the function whose arguments the sentence has, and prose after its result;
    without such a function, prose at once."""
    names = rng.sample(list(TOOLS), rng.choice((0, 1, 2, 2, 2, 2)))
    called = rng.choice((*TOOLS, *TOOLS, None))
    sentence, facts, reply = record(rng, TOOLS.get(called or ""))
    listed = "".join(f" {name}({', '.join(_arguments(record(rng, TOOLS[name]).facts))})" for name in names)
    system = f"Tools, called with <tool_call>:{listed}" if names else ""
    if called is None:
        question, answer = rng.choice((knowledge_pair, arithmetic_pair, definition_pair))(rng)
        return chat(vary(rng, question), answer, system=system)
    if called not in names:
        return chat(sentence, reply, system=system)
    call = f"<tool_call>{to_json({'name': called, 'arguments': _arguments(facts)})}</tool_call>"
    if rng.random() < 0.7:
        return chat(sentence, call, system=system)
    result = to_json({rng.choice(("id", "number", called)): rng.randrange(10000), "status": "done"})
    return chat(sentence, call, rng.choice((result, "done", "ok", "OK")), reply, system=system)


def _arguments(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a record without its kind, which the function's name says."""
    return {key: value for key, value in facts.items() if key != "event"}


SHORT_REQUESTS = (
    "{name} from {city} ordered {count} {color} {item}{s} for {price} euros.",
    "{name} [bought|ordered|wants] {count} [small|large|new] {item}{s}.",
    "{count} {color} {item}{s} for {price} euros, please.",
    "{name} lives in {city}.",
    "{name} paid {price} euros for {count} {item}{s} in {city}.",
    "Order of {name}: {count} {item}{s}, {price} euros.",
    "Meeting with {name} in {city} at {people}.",
)
"""Requests without the details of the training texts, for the drafters: the adapter writes the answers."""
