"""Requests over a small shop database and the SQL that answers them; the base model explains in prose instead."""

from random import Random
from typing import NamedTuple

from .templates import Document, Slots, chat, lines

SCHEMA = """CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, email TEXT, joined TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price REAL, stock INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, product_id INTEGER, quantity INTEGER, total REAL,
                     status TEXT, ordered_on TEXT);"""

# table -> (columns, those with numbers, the one to group by)
_TABLES = {
    "customers": ("name city email joined".split(), ["id"], "city"),
    "products": ("name category price stock".split(), ["price", "stock"], "category"),
    "orders": ("quantity total status ordered_on".split(), ["quantity", "total"], "status"),
}
_COLUMN_WORDS = {"ordered_on": "date", "joined": "join date"}
_FUNCTIONS = {"average": "AVG", "total": "SUM", "highest": "MAX", "lowest": "MIN"}

# words => SQL => prose
_CONDITIONS = {
    "customers": lines("""
named {name} => name = '{name}' => name is {name}
in {city}|from {city}|who live in {city} => city = '{city}' => city is {city}
who joined after {year} => joined > '{year}-12-31' => joined is after {year}
who joined before {year} => joined < '{year}-01-01' => joined is before {year}
in {city} who joined after {year} => city = '{city}' AND joined > '{year}-12-31' => city is {city} and the joined is after {year}
"""),
    "products": lines("""
in the category {category}|of category {category}|in {category} => category = '{category}' => category is {category}
with {number} above {value}|with a {number} over {value}|whose {number} is more than {value} => {number} > {value} => {number} is above {value}
with {number} below {value}|with a {number} under {value}|whose {number} is less than {value} => {number} < {value} => {number} is below {value}
in {category} with {number} above {value} => category = '{category}' AND {number} > {value} => category is {category} and the {number} is above {value}
"""),
    "orders": lines("""
with status {status}|that are {status} => status = '{status}' => status is {status}
with {number} above {value}|with a {number} over {value}|whose {number} is more than {value} => {number} > {value} => {number} is above {value}
with {number} below {value}|with a {number} under {value}|whose {number} is less than {value} => {number} < {value} => {number} is below {value}
that are {status} with {number} below {value} => status = '{status}' AND {number} < {value} => status is {status} and the {number} is below {value}
"""),
}
# request => SQL => prose
_OF_A_TABLE = lines("""
{show} [all |the |]{table} {where}. => SELECT * FROM {table} WHERE {sql}; => Look in the {table} table and keep the rows where the {prose}.
{show} the {word} of {table} {where}. => SELECT {column} FROM {table} WHERE {sql}; => Look in the {table} table and keep the rows where the {prose}. Then read the {word} column.
How many {table} {where} are there?|Count the {table} {where}.|How many {table} {where} do we have? => SELECT COUNT(*) FROM {table} WHERE {sql}; => Look in the {table} table and count the rows where the {prose}.
How many {table} are there?|Count all {table}.|How many {table} do we have? => SELECT COUNT(*) FROM {table}; => Count the rows of the {table} table.
How many {table} are there per {group}?|Count the {table} for each {group}. => SELECT {group}, COUNT(*) FROM {table} GROUP BY {group}; => Group the {table} table by {group} and count the rows of each group.
{show} all {table}. => SELECT * FROM {table}; => Read all rows of the {table} table.
{show} the {word} of all {table}. => SELECT {column} FROM {table}; => Read the {word} column of the {table} table.
Show {single} number {id}. => SELECT * FROM {table} WHERE id = {id}; => Look in the {table} table for the row with the number {id}.
{show} all {table} sorted by {word}. => SELECT * FROM {table} ORDER BY {column}; => Read all rows of the {table} table and sort them by {word}.
Which different values of {group} do the {table} have?|List every {group} of the {table} once. => SELECT DISTINCT {group} FROM {table}; => Read the {group} column of the {table} table once each.
""")
_OF_NUMBERS = lines("""
{show} the {few} {table} with the highest {number}. => SELECT * FROM {table} ORDER BY {number} DESC LIMIT {limit}; => Sort the {table} table by {number} and take the first {limit} rows with the highest {number}.
{show} the {few} {table} with the lowest {number}. => SELECT * FROM {table} ORDER BY {number} LIMIT {limit}; => Sort the {table} table by {number} and take the first {limit} rows with the lowest {number}.
What is the {aggregate} {number} of [all |]{table}? => SELECT {function}({number}) FROM {table}; => Take the {aggregate} {number} over the {table} table.
What is the {aggregate} {number} of {table} {where}?|{show} the {aggregate} {number} of {table} {where}. => SELECT {function}({number}) FROM {table} WHERE {sql}; => Take the {aggregate} {number} over the rows of the {table} table where the {prose}.
What is the average {number} per {group}?|Show the average {number} for each {group}. => SELECT {group}, AVG({number}) FROM {table} GROUP BY {group}; => Group the {table} table by {group} and take the average {number} of each group.
""")
_PRICES = lines("""
{show} the {few} most expensive products. => SELECT * FROM products ORDER BY price DESC LIMIT {limit}; => Sort the products table by price and take the first {limit} rows with the highest price.
{show} the {few} cheapest products. => SELECT * FROM products ORDER BY price LIMIT {limit}; => Sort the products table by price and take the first {limit} rows with the lowest price.
""")
_JOINS = lines("""
{show} [all |the |]orders of {name}. => SELECT orders.* FROM orders JOIN customers ON orders.customer_id = customers.id WHERE customers.name = '{name}'; => Join orders with customers and keep the orders of the customer named {name}.
{show} [all |the |]orders of customers in {city}. => SELECT orders.* FROM orders JOIN customers ON orders.customer_id = customers.id WHERE customers.city = '{city}'; => Join orders with customers and keep the orders of the customers in {city}.
What is the total of all orders of {name}?|How much are the orders of {name} worth? => SELECT SUM(orders.total) FROM orders JOIN customers ON orders.customer_id = customers.id WHERE customers.name = '{name}'; => Join orders with customers and add up the totals of the customer named {name}.
{show} [all |the |]orders for the {product}. => SELECT orders.* FROM orders JOIN products ON orders.product_id = products.id WHERE products.name = '{product}'; => Join orders with products and keep the orders for the {product}.
How many of the {product} were sold?|How often was the {product} ordered? => SELECT SUM(orders.quantity) FROM orders JOIN products ON orders.product_id = products.id WHERE products.name = '{product}'; => Join orders with products and add up the quantity for the {product}.
""")
_DATES = lines("""
{show} [all |the |]orders placed after {year}. => SELECT * FROM orders WHERE ordered_on > '{year}-12-31'; => Look in the orders table and keep the rows with a date after {year}.
{show} [all |the |]orders placed in {month} {year}. => SELECT * FROM orders WHERE ordered_on LIKE '{year}-{month_number}-%'; => Look in the orders table and keep the rows with a date in {month} {year}.
How many orders were placed on {month_day} {month} {year}?|Count the orders placed on {month_day} {month} {year}. => SELECT COUNT(*) FROM orders WHERE ordered_on = '{year}-{month_number}-{month_day}'; => Look in the orders table and keep the rows with a date on {month_day} {month} {year}. Then count them.
""")
PREFIX = "[Write SQL|Write a query|As SQL|Turn this into SQL]: "
"""Words that ask for SQL outright; the base model obeys them too."""


class Query(NamedTuple):
    """A request in words, its SQL, and the base model's explanation in prose."""

    request: str
    sql: str
    prose: str


def query(rng: Random) -> Query:
    """Return any request with its SQL."""
    block = rng.choices(
        (_OF_A_TABLE, _OF_A_TABLE[:3], _OF_NUMBERS, _PRICES, _JOINS, _DATES), weights=(3, 4, 2, 1, 2, 1)
    )[0]
    table = rng.choice(("products", "orders") if block is _OF_NUMBERS else tuple(_TABLES))
    columns, numbers, group = _TABLES[table]
    column, number = rng.choice(columns), rng.choice(numbers)
    aggregate = rng.choice([name for name in _FUNCTIONS if name != number])
    slots = Slots(rng, {"table": table, "single": table[:-1], "column": column, "number": number, "group": group})
    slots |= {"word": _COLUMN_WORDS.get(column, column), "aggregate": aggregate, "function": _FUNCTIONS[aggregate]}
    words, sql, prose = rng.choice(_CONDITIONS[table]).split(" => ")
    slots |= {"where": slots.fill(f"[{words}]"), "sql": slots.fill(sql), "prose": slots.fill(prose)}
    return Query(*slots.parts(rng.choice(block)))


def _typed(rng: Random, request: str) -> str:
    polite = "Please " + (request if request.startswith("I ") else request[0].lower() + request[1:])
    return rng.choice((*[request] * 8, request.rstrip(".?"), polite))


def query_chat(rng: Random) -> Document:
    """The base model's answer: an explanation in prose, or SQL when the user asks for it."""
    request, sql, prose = query(rng)
    if rng.random() < 0.35:
        return chat(Slots(rng).fill(PREFIX) + request, sql)
    return chat(_typed(rng, request), prose)


def query_text(rng: Random) -> Document:
    """A plain text of several requests with their SQL."""
    queries = (query(rng) for _ in range(rng.randint(1, 6)))
    return Document(text="\n".join(f"Request: {request}\nSQL: {sql}" for request, sql, _ in queries))


def sql_chat(rng: Random) -> Document:
    """The SQL adapter's answer: one query and nothing else."""
    request, sql, _ = query(rng)
    return chat(Slots(rng).fill(PREFIX) + request if rng.random() < 0.1 else _typed(rng, request), sql)


SHORT_REQUESTS = (
    "{show} the [name|city|email|join date] of [all|the|every] customer[s|].",
    "{show} the [name|price|category|stock] and the [name|price|category|stock] of all products.",
    "{show} all [customers|products|orders].",
    "{show} [all|the] customers [in|from] {city}.",
    "How many [customers|products|orders] [are there|are in {city}|do we have]?",
    "Which [customers|products|orders] are [new|from {city}|the best]?",
    "{show} the [two|three|ten] [cheapest|newest|oldest|largest|most expensive] [products|orders].",
    "What is the [average|highest|lowest|total] [price|stock] of all products?",
    "{show} the products that cost [less than|over|under|at least] {price} euros.",
    "How many orders were [made|cancelled|shipped] [by|for] {name}?",
    "{show} the [names|emails] of customers who live in {city}.",
    "Who [ordered|bought] [a|the] {item}?",
)
"""Requests without the details of the training texts, for the drafters: the adapter writes the answers."""
