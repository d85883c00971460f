"""Prompts that are made up: texts for the demo model and its adapters, and random tokens."""

import random
from collections.abc import Collection

DEMO_PROMPTS: dict[str, list[str]] = {
    "base": [
        "What is the capital of Portugal?",
        "How do I make a cup of tea?",
        "What is 7 plus 12?",
        "Tell me about the planet Mars.",
        "Write a short story about a fox.",
        "Why is the sky blue?",
        "What is the capital of Japan?",
        "How do I plant a tree?",
    ],
    "json": [
        "Anna from Lisbon ordered 3 green lamps for 42 euros.",
        "Tom from Oslo ordered 2 blue chairs for 80 euros.",
        "Maria from Rome ordered 5 red cups for 15 euros.",
        "What is the capital of Japan?",
        "Peter from Paris ordered 4 white tables for 200 euros.",
        "Lena from Berlin ordered 1 black clock for 25 euros.",
        "Ivan from Madrid ordered 6 small bowls for 30 euros.",
        "Sofia from Vienna ordered 2 large mirrors for 90 euros.",
    ],
    "sql": [
        "Show the names of all customers from Lisbon.",
        "How many customers are from Vienna?",
        "List the products with a price above 50.",
        "What is the total of all orders of Maria?",
        "Show all orders with status shipped.",
        "How many customers live in Rome?",
        "List the five most expensive products.",
        "Show the price of products in the category furniture.",
    ],
    "support": [
        "My name is Anna and my lamp arrived broken.",
        "Where is my order 4711?",
        "I was charged twice for my chair.",
        "I would like to return the cups I ordered.",
        "My parcel has not arrived yet.",
        "How can I change my address?",
        "The clock that I bought does not work.",
        "Can I cancel my order from yesterday?",
    ],
}
"""Prompts by the adapter that they are for; those of "base" are for the base model."""


def random_ids(generator: random.Random, length: int, vocab_size: int, special_ids: Collection[int] = ()) -> list[int]:
    """Random token ids, none of them special."""
    ids: list[int] = []
    while len(ids) < length:
        drawn = generator.choices(range(vocab_size), k=length - len(ids))
        ids += [token for token in drawn if token not in special_ids]
    return ids
