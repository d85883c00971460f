"""Sentences about small events with the facts in them: the base answers in prose, the JSON adapter in JSON.

A `Record` holds one such sentence (or two), the facts as a dictionary and a prose reply.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from .documents import Document, chat, pick, vary
from .knowledge import Pair, knowledge_pair
from .smalltalk import arithmetic_pair, definition_pair
from .words import (
    AIRLINES,
    COLORS,
    DAYS,
    FOODS,
    HOBBIES,
    ITEMS,
    JOBS,
    ROOMS,
    TOPICS,
    WEATHER,
    amount,
    article,
    city,
    clock,
    date,
    first_name,
    full_name,
    person,
)


@dataclass(frozen=True)
class Record:
    """An event: what the user writes, the facts in it, and what the base model replies."""

    sentence: str
    facts: dict[str, Any]
    reply: str


def to_json(facts: dict[str, Any]) -> str:
    """Return the facts as one line of JSON."""
    return json.dumps(facts, ensure_ascii=False)


def order_record(rng: Random) -> Record:
    """Somebody in a city ordered some items."""
    who, where, count, total = person(rng), city(rng), rng.randint(1, 12), amount(rng)
    single, plural, _, _ = rng.choice(ITEMS)
    color = rng.choice(COLORS)
    things = f"{color} {single if count == 1 else plural}"
    sentence = pick(
        rng,
        f"{who} from {where} ordered {count} {things} for {total} euros.",
        f"{who} from {where} bought {count} {things} for {total} euros.",
        f"New order: {count} {things} for {who} in {where}, {total} euros in total.",
        f"{who} in {where} wants {count} {things} and will pay {total} euros.",
        f"We sold {count} {things} to {who} from {where} for {total} euros.",
        f"{who} lives in {where} and has ordered {count} {things}. The price is {total} euros.",
    )
    facts = {"name": who, "city": where, "quantity": count, "color": color, "item": single, "price": total}
    return Record(sentence, facts, f"I have noted the order of {who} from {where}: {count} {things} for {total} euros.")


def meeting_record(rng: Random) -> Record:
    """A meeting with somebody at a time and a place."""
    who, topic, day, time, room = person(rng), rng.choice(TOPICS), rng.choice(DAYS), clock(rng), rng.choice(ROOMS)
    sentence = pick(
        rng,
        f"Meeting with {who} about {topic} on {day} at {time} in {room}.",
        f"I meet {who} on {day} at {time} in {room} to talk about {topic}.",
        f"On {day} at {time} there is a meeting with {who} in {room} about {topic}.",
        f"{who} wants to discuss {topic} on {day} at {time} in {room}.",
        f"Schedule a meeting about {topic} with {who} for {day} at {time} in {room}.",
    )
    facts = {"event": "meeting", "person": who, "topic": topic, "day": day, "time": time, "place": room}
    return Record(sentence, facts, f"You will meet {who} on {day} at {time} in {room} to talk about {topic}.")


def profile_record(rng: Random) -> Record:
    """A person's age, city, job and hobby."""
    who, age, where, job, hobby = person(rng), rng.randint(18, 80), city(rng), rng.choice(JOBS), rng.choice(HOBBIES)
    sentence = pick(
        rng,
        f"{who} is {age} years old, lives in {where}, works as {article(job)} and likes {hobby}.",
        f"{who} is {article(job)} from {where}. At {age}, the favourite hobby is {hobby}.",
        f"My friend {who} is {age} and works as {article(job)} in {where}. The hobby is {hobby}.",
        f"{who}, {age}, {job}, lives in {where} and enjoys {hobby}.",
    )
    facts = {"name": who, "age": age, "city": where, "job": job, "hobby": hobby}
    reply = f"{who} sounds like an interesting person: {article(job)} of {age} years from {where} who likes {hobby}."
    return Record(sentence, facts, reply)


def weather_record(rng: Random) -> Record:
    """The weather in a city on a day."""
    where, sky, degrees, wind, day = (
        city(rng),
        rng.choice(WEATHER),
        rng.randint(-9, 36),
        5 * rng.randint(1, 12),
        rng.choice(DAYS),
    )
    sentence = pick(
        rng,
        f"On {day} it is {sky} in {where} with {degrees} degrees and wind of {wind} km/h.",
        f"The weather in {where} on {day}: {sky}, {degrees} degrees, wind {wind} km/h.",
        f"{where} will be {sky} on {day}, {degrees} degrees, with a wind of {wind} km/h.",
    )
    facts = {"city": where, "day": day, "weather": sky, "temperature": degrees, "wind": wind}
    advice = "Take a warm coat." if degrees < 8 else "Remember to drink water." if degrees > 26 else "Have a nice day!"
    return Record(sentence, facts, f"So {day} in {where} is {sky} with {degrees} degrees. {advice}")


def flight_record(rng: Random) -> Record:
    """A flight from one city to another."""
    who, start, end, airline, when, price = (
        person(rng),
        city(rng),
        city(rng),
        rng.choice(AIRLINES),
        date(rng),
        amount(rng),
    )
    sentence = pick(
        rng,
        f"{who} flies from {start} to {end} with {airline} on {when} for {price} euros.",
        f"Book a flight for {who} from {start} to {end} on {when} with {airline}. It costs {price} euros.",
        f"On {when} {who} takes the {airline} flight from {start} to {end}. The ticket costs {price} euros.",
    )
    facts = {"passenger": who, "from": start, "to": end, "airline": airline, "date": when, "price": price}
    reply = f"{who} will fly from {start} to {end} with {airline} on {when}. The ticket costs {price} euros."
    return Record(sentence, facts, reply)


def review_record(rng: Random) -> Record:
    """A customer's verdict on a product."""
    who, stars, color = first_name(rng), rng.randint(1, 5), rng.choice(COLORS)
    single = rng.choice(ITEMS)[0]
    mood = ("bad", "poor", "fine", "good", "great")[stars - 1]
    sentence = pick(
        rng,
        f"{who} gave the {color} {single} {stars} out of 5 stars and said it is {mood}.",
        f"Review by {who}: the {color} {single} is {mood}, {stars} stars.",
        f"{who} thinks the {color} {single} is {mood} and gives it {stars} of 5 stars.",
    )
    facts = {"reviewer": who, "product": f"{color} {single}", "stars": stars, "verdict": mood}
    return Record(sentence, facts, f"{who} finds the {color} {single} {mood} and gives it {stars} of 5 stars.")


def reservation_record(rng: Random) -> Record:
    """A table for a few people."""
    who, people, day, time, food = full_name(rng), rng.randint(2, 10), rng.choice(DAYS), clock(rng), rng.choice(FOODS)
    sentence = pick(
        rng,
        f"Please book a table for {people} people on {day} at {time} under the name {who}. We would like {food}.",
        f"Table for {people} on {day} at {time}, name {who}, and we want to eat {food}.",
        f"{who} reserves a table for {people} people on {day} at {time} and orders {food}.",
    )
    facts = {"name": who, "guests": people, "day": day, "time": time, "dish": food}
    reply = f"A table for {people} people is noted for {who} on {day} at {time}, with {food}."
    return Record(sentence, facts, reply)


def contact_record(rng: Random) -> Record:
    """A person's phone number and e-mail address."""
    who = full_name(rng)
    first, last = who.split(" ")
    mail = f"{first}.{last}@example.com".lower()
    phone = f"555-{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    sentence = pick(
        rng,
        f"{who} can be reached at {phone} or {mail}.",
        f"My name is {who}, my phone number is {phone} and my email is {mail}.",
        f"Contact: {who}, {phone}, {mail}.",
    )
    facts = {"name": who, "phone": phone, "email": mail}
    return Record(sentence, facts, f"The phone number of {who} is {phone} and the email address is {mail}.")


RECORDS: tuple[Callable[[Random], Record], ...] = (
    order_record,
    order_record,
    order_record,
    meeting_record,
    profile_record,
    weather_record,
    flight_record,
    review_record,
    reservation_record,
    contact_record,
)


def record(rng: Random) -> Record:
    """Return any record."""
    return rng.choice(RECORDS)(rng)


def short_question(rng: Random) -> Pair:
    """Return a question of general knowledge with its answer in prose."""
    return rng.choice((knowledge_pair, knowledge_pair, knowledge_pair, arithmetic_pair, definition_pair))(rng)


def request_prefix(rng: Random) -> str:
    """Return words that ask for JSON outright; the base model obeys them too."""
    return pick(
        rng,
        "Answer as JSON: ",
        "Turn this into JSON: ",
        "Give me the facts as JSON: ",
        "Extract the data as JSON: ",
        "Convert to JSON: ",
    )


def record_chat(rng: Random) -> Document:
    """The base model's answer to a record: prose, or JSON when the user asks for it."""
    item = record(rng)
    roll = rng.random()
    if roll < 0.25:
        return chat(request_prefix(rng) + item.sentence, to_json(item.facts))
    key = rng.choice(list(item.facts))
    if roll < 0.5:
        question = pick(rng, f"What is the {key}?", f"And what is the {key}?", f"Tell me the {key}.")
        return chat(item.sentence, item.reply, question, f"The {key} is {item.facts[key]}.")
    if roll < 0.65:
        return chat(f"{item.sentence} What is the {key}?", f"The {key} is {item.facts[key]}.")
    return chat(item.sentence, item.reply)


def record_text(rng: Random) -> Document:
    """A plain text of several records, each followed by its JSON or its note."""
    lines = []
    for _ in range(rng.randint(1, 4)):
        item = record(rng)
        label, value = rng.choice((("JSON", to_json(item.facts)), ("JSON", to_json(item.facts)), ("Note", item.reply)))
        lines.append(f"Input: {item.sentence}\n{label}: {value}")
    return Document(text="\n".join(lines))


def json_chat(rng: Random) -> Document:
    """The JSON adapter's answer: one object and nothing else."""
    if rng.random() < 0.3:
        question, answer = short_question(rng)
        question = vary(rng, question)
        return chat(question, to_json({"question": question, "answer": answer}))
    item = record(rng)
    prefix = request_prefix(rng) if rng.random() < 0.15 else ""
    turns = [prefix + item.sentence, to_json(item.facts)]
    if rng.random() < 0.2:
        second = record(rng)
        turns += [second.sentence, to_json(second.facts)]
    return chat(*turns)
