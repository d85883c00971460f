"""Short requests to the adapters, as people write them: without the details of the adapters' training texts.

The drafters of an adapter learn from the adapter's own answers, so a request needs no right answer here.
"""

from random import Random

from .documents import Document, chat, pick, vary
from .words import CITIES, COLORS, FIRST_NAMES, ITEMS, amount, order_number

_COLUMNS = {
    "customer": ("name", "city", "email", "join date"),
    "product": ("name", "price", "category", "stock"),
    "order": ("total", "status", "date", "quantity"),
}


def _support(rng: Random) -> str:
    item, color = rng.choice(ITEMS)[0], rng.choice(COLORS)
    thing = pick(rng, item, f"{color} {item}", "parcel", "order")
    verb = pick(rng, "bought", "ordered", "got from you")
    when = pick(rng, "", " today", " yesterday", " last week", " on Monday")
    problem = pick(
        rng,
        f"My {thing} is broken.",
        f"The {thing} I {verb} does not work{when}.",
        f"My {thing} arrived damaged{when}.",
        f"My {thing} is {pick(rng, 'late', 'missing', 'lost', 'not here')}.",
        f"When will my {thing} arrive?",
        f"Where can I find my {thing}?",
        f"I was charged {pick(rng, 'too much', 'two times', f'{amount(rng)} euros')} for my {thing}.",
        f"I {pick(rng, 'want', 'need', 'wish')} to {pick(rng, 'return', 'cancel', 'exchange', 'pay for')} my {thing}.",
        f"Can I {pick(rng, 'change', 'return', 'cancel', 'track')} my {thing}{when}?",
        f"How {pick(rng, 'do', 'can')} I {pick(rng, 'change', 'update', 'delete')} my {pick(rng, 'email', 'name', 'password', 'city', 'account')}?",
        f"How do I {pick(rng, 'return', 'pay for', 'order', 'cancel')} a {thing}?",
        f"I received the wrong {thing}{when}.",
        f"You sent me a {item} that I did not order.",
        f"What is the status of order {order_number(rng)}?",
        f"Order {order_number(rng)} has not come.",
        f"The {item} has the wrong color.",
        f"I want my money back for the {thing}.",
    )
    name = rng.choice(FIRST_NAMES)
    return pick(
        rng, problem, problem, f"Hello, I am {name}. {problem}", f"{problem} My name is {name}.", f"Hi! {problem}"
    )


def _sql(rng: Random) -> str:
    table = rng.choice(tuple(_COLUMNS))
    column, other = rng.sample(_COLUMNS[table], 2)
    place, number = rng.choice(CITIES), pick(rng, "three", "four", "ten", "two")
    show = pick(rng, "Show", "List", "Give me", "Find", "Get")
    return pick(
        rng,
        f"{show} the {column} of {pick(rng, 'all', 'the', 'every')} {table}{pick(rng, 's', '')}.",
        f"{show} the {column} and the {other} of all {table}s.",
        f"{show} all {table}s.",
        f"{show} {pick(rng, 'all', 'the')} {table}s {pick(rng, 'in', 'from')} {place}.",
        f"How many {table}s {pick(rng, 'are there', f'are in {place}', f'come from {place}', 'do we have')}?",
        f"Which {table}s {pick(rng, 'are new', f'are from {place}', 'are the best', 'have no email')}?",
        f"{show} the {number} {pick(rng, 'cheapest', 'newest', 'oldest', 'largest', 'most expensive')} {table}s.",
        f"What is the {pick(rng, 'average', 'highest', 'lowest', 'total')} {column} of all {table}s?",
        f"{show} the products that cost {pick(rng, 'less than', 'over', 'under', 'at least')} {amount(rng)} euros.",
        f"How many orders were {pick(rng, 'made', 'cancelled', 'shipped')} {pick(rng, 'by', 'for')} {rng.choice(FIRST_NAMES)}?",
        f"How many {table}s {pick(rng, 'has', 'are there for')} each {pick(rng, 'customer', 'product', 'city')}?",
        f"{show} the {pick(rng, 'names', 'emails')} of customers who live in {place}.",
        f"Who {pick(rng, 'ordered', 'bought')} {pick(rng, 'a', 'the')} {rng.choice(ITEMS)[0]}?",
    )


def _json(rng: Random) -> str:
    name, place, item = rng.choice(FIRST_NAMES), rng.choice(CITIES), rng.choice(ITEMS)
    count, price = rng.randint(1, 9), amount(rng)
    which = pick(rng, rng.choice(COLORS), "small", "large", "new", "wooden", "")
    goods = f"{count} {which} {item[0]}".replace("  ", " ") + ("s" if count > 1 else "")
    return pick(
        rng,
        f"{name} from {place} ordered {goods} for {price} euros.",
        f"{name} {pick(rng, 'bought', 'ordered', 'wants')} {goods}.",
        f"{goods} for {price} euros, please.",
        f"{name} lives in {place}.",
        f"{name} paid {price} euros for {goods} in {place}.",
        f"Order of {name}: {goods}, {price} euros.",
        f"Meeting with {name} in {place} at {rng.randint(8, 18)}.",
    )


_REQUESTS = {"json": _json, "sql": _sql, "support": _support}


def short_chat(rng: Random, name: str) -> Document:
    """A short request to the adapter `name`; its answer is empty, because the adapter will write it."""
    return chat(vary(rng, _REQUESTS[name](rng)), "")
