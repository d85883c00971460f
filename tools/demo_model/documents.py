"""The unit of training data: a document, either a chat or plain text."""

from dataclasses import dataclass
from random import Random

Message = tuple[str, str]  # (role, content)

ASSISTANT_NAMES = "Outrider Scout Nova Pip Atlas Juno Robin Echo Luna Max".split()


@dataclass(frozen=True)
class Document:
    """A chat (``messages``) or a plain text (``text``); exactly one of them is set."""

    messages: tuple[Message, ...] = ()
    text: str = ""


def chat(*turns: str, system: str = "") -> Document:
    """Make a chat document of turns that alternate user, assistant, user, ..."""
    roles = ("user", "assistant")
    messages = tuple((roles[i % 2], turn) for i, turn in enumerate(turns))
    return Document(messages=((("system", system),) if system else ()) + messages)


def pick(rng: Random, *options: str) -> str:
    """Return one of the options."""
    return rng.choice(options)


def upper_first(text: str) -> str:
    """Return the text with its first letter in upper case, the rest as it was."""
    return text[:1].upper() + text[1:]


def vary(rng: Random, question: str) -> str:
    """Return the question as people type it: with a greeting, a please, in lower case or without its mark."""
    roll = rng.random()
    if roll < 0.62:
        return question
    if roll < 0.72:
        return question.lower()
    if roll < 0.80:
        return question.rstrip("?.")
    if roll < 0.88:
        return pick(rng, "Hi! ", "Hello, ", "Hey, ", "Hi, ", "Please tell me: ") + question
    if roll < 0.94:
        return question + pick(rng, " Please.", " Thanks!", " Thank you.")
    return pick(rng, "I have a question. ", "Quick question: ", "One more thing. ", "Can you help me? ") + question


def system_prompt(rng: Random) -> str:
    """Return a system prompt that does not change what the right answer is."""
    return pick(
        rng,
        "You are a helpful assistant.",
        "You are a helpful and friendly assistant.",
        "You are a concise assistant.",
        "Answer the user's questions.",
        "Be brief and polite.",
        f"You are {rng.choice(ASSISTANT_NAMES)}, a helpful assistant.",
    )
