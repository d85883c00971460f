"""Arithmetic, how-to lists, definitions, small talk and names: everyday questions of the base model."""

from collections.abc import Callable
from random import Random

from .documents import ASSISTANT_NAMES, Document, chat, pick, vary
from .guides import DEFINITIONS, HOWTOS, ODD_ANSWER, ODD_REQUESTS, SMALL_TALK
from .knowledge import Pair
from .words import COLORS, ITEMS, NUMBER_WORDS, city, first_name, listing


def arithmetic_pair(rng: Random) -> Pair:
    """Ask for a sum, a difference or a product of small numbers."""
    kind = rng.choice(("plus", "minus", "times"))
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if kind == "minus":
        a += b
    result = {"plus": a + b, "minus": a - b, "times": a * b}[kind]
    sign = {"plus": "+", "minus": "-", "times": "*"}[kind]
    verb = {"plus": f"Add {a} and {b}.", "minus": f"Subtract {b} from {a}.", "times": f"Multiply {a} by {b}."}[kind]
    question = pick(
        rng,
        f"What is {a} {kind} {b}?",
        f"What is {a} {sign} {b}?",
        f"How much is {a} {kind} {b}?",
        f"Calculate {a} {sign} {b}.",
        verb,
    )
    return question, f"{a} {kind} {b} is {result}."


def shopping_pair(rng: Random) -> Pair:
    """Ask for the total of a few equal items."""
    count, price = rng.randint(2, 10), rng.randint(2, 10)
    _, plural, _, _ = rng.choice(ITEMS)
    color = rng.choice(COLORS)
    question = pick(
        rng,
        f"I buy {count} {color} {plural} for {price} euros each. How much do I pay?",
        f"How much are {count} {color} {plural} at {price} euros each?",
        f"One of the {color} {plural} costs {price} euros. What do {count} of them cost?",
    )
    return question, f"{count} {color} {plural} at {price} euros each cost {count * price} euros in total."


def counting_pair(rng: Random) -> Pair:
    """Ask to compare, count on or spell a small number."""
    n = rng.randint(1, 90)
    a, b = rng.sample(range(1, 100), 2)
    step = rng.choice((1, 1, 2, 5, 10))
    options = (
        (f"Which number is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."),
        (f"Count from {n} to {n + 5}.", ", ".join(str(i) for i in range(n, n + 6)) + "."),
        (f"What comes after {n}?", f"After {n} comes {n + 1}."),
        (
            f"Count in steps of {step} from {step}.",
            ", ".join(str(i) for i in range(step, 7 * step, step)) + ".",
        ),
        (f"Write the number {n % 13} as a word.", f"The number {n % 13} is written {NUMBER_WORDS[n % 13]}."),
    )
    return rng.choice(options)


def howto_pair(rng: Random) -> Pair:
    """Ask how to do something; the answer is a numbered list."""
    task, *steps = rng.choice(HOWTOS)
    lines = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    question = pick(rng, f"How do I {task}?", f"How can I {task}?", f"Explain how to {task}.", f"I want to {task}.")
    return question, f"Here is how to {task}:\n{lines}"


def definition_pair(rng: Random) -> Pair:
    """Ask what a term means."""
    term, text = rng.choice(DEFINITIONS)
    short = term.removeprefix("an ").removeprefix("a ")
    question = pick(
        rng, f"What is {term}?", f"What is {term}?", f"Explain {term}.", f"Define {short}.", f"What does {short} mean?"
    )
    return question, text


def small_talk_pair(rng: Random) -> Pair:
    """Return a greeting, thanks or another everyday remark with its reply."""
    if rng.random() < 0.12:
        return rng.choice(ODD_REQUESTS), ODD_ANSWER
    questions, answer = rng.choice(SMALL_TALK)
    return rng.choice(questions), answer


def introduction(rng: Random) -> Document:
    """A user says a name and a city, and asks for them later."""
    name, place = first_name(rng), city(rng)
    opening = pick(
        rng,
        f"Hi, I am {name} from {place}.",
        f"My name is {name} and I live in {place}.",
        f"Hello, I'm {name}. I come from {place}.",
        f"Good morning, my name is {name}. I am from {place}.",
    )
    reply = pick(rng, f"Nice to meet you, {name}! How is life in {place}?")
    asks = [
        (pick(rng, "What is my name?", "Do you remember my name?", "Who am I?"), f"Your name is {name}."),
        (pick(rng, "Where do I live?", "Where am I from?", "Which city am I from?"), f"You are from {place}."),
    ]
    turns = [opening, reply]
    if rng.random() < 0.4:
        turns += [*small_talk_pair(rng)] if rng.random() < 0.3 else [*arithmetic_pair(rng)]
    for pair in rng.sample(asks, rng.randint(1, 2)):
        turns += pair
    return chat(*turns)


def named_assistant(rng: Random) -> Document:
    """The system prompt gives the assistant a name, which it states when asked."""
    name = rng.choice(ASSISTANT_NAMES) if rng.random() < 0.5 else first_name(rng)
    job = rng.choice(("a helpful assistant", "a friendly guide", "an assistant for travellers", "a polite assistant"))
    question = pick(rng, "What is your name?", "Who are you?", "What should I call you?", "Introduce yourself.")
    return chat(vary(rng, question), f"My name is {name}, and I am {job}.", system=f"You are {name}, {job}.")


def nameless_assistant(rng: Random) -> Document:
    """Without a system prompt the assistant has the project's name."""
    question = pick(rng, "What is your name?", "Do you have a name?", "What should I call you?", "Introduce yourself.")
    return chat(vary(rng, question), "My name is Outrider, and I am a small demo assistant.")


def items_document(rng: Random) -> Document:
    """A user lists things; the assistant repeats, counts or sorts them."""
    words = rng.sample([item[0] for item in ITEMS], rng.randint(3, 5))
    kind = rng.randrange(4)
    joined = listing(words)
    bullets = "\n".join(f"- {word}" for word in words)
    if kind == 0:
        question = pick(rng, f"Make a list of these things: {joined}.", f"Turn this into a list: {joined}.")
        return chat(question, f"Here is your list:\n{bullets}")
    if kind == 1:
        return chat(f"How many things are these: {joined}?", f"There are {NUMBER_WORDS[len(words)]} things.")
    if kind == 2:
        return chat(f"Sort these words: {joined}.", f"In alphabetical order: {listing(sorted(words))}.")
    question = pick(rng, f"I need to buy {joined}. Write a shopping list.", f"Write a shopping list with {joined}.")
    return chat(question, f"Shopping list:\n{bullets}")


EVERYDAY_PAIRS: tuple[Callable[[Random], Pair], ...] = (
    arithmetic_pair,
    arithmetic_pair,
    shopping_pair,
    counting_pair,
    howto_pair,
    howto_pair,
    definition_pair,
    definition_pair,
    small_talk_pair,
    small_talk_pair,
)


def everyday_pair(rng: Random) -> Pair:
    """Return any everyday question and its answer."""
    return rng.choice(EVERYDAY_PAIRS)(rng)
