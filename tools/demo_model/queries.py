"""Requests over a small shop database and the SQL that answers them; the base model explains in prose instead."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from .documents import Document, chat, pick, upper_first
from .words import CATEGORIES, COLORS, ITEMS, MONTHS, NUMBER_WORDS, city, first_name

SCHEMA = """CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, email TEXT, joined TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price REAL, stock INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, product_id INTEGER, quantity INTEGER, total REAL,
                     status TEXT, ordered_on TEXT);"""

STATUSES = "open shipped delivered cancelled returned".split()

# table -> (its name in a request, its numeric columns, all its columns)
_COLUMNS = {
    "customers": ("name", "city", "email", "joined"),
    "products": ("name", "category", "price", "stock"),
    "orders": ("quantity", "total", "status", "ordered_on"),
}
_NUMERIC = {"products": ("price", "stock"), "orders": ("quantity", "total")}
_COLUMN_WORDS = {"ordered_on": "date", "joined": "join date"}


class Query(NamedTuple):
    """A request in words, its SQL, and the base model's explanation in prose."""

    request: str
    sql: str
    prose: str


class Condition(NamedTuple):
    """A restriction of a table: in words, as SQL, and for the explanation."""

    words: str
    sql: str
    prose: str


def quote(text: str) -> str:
    """Return the text as a SQL string."""
    return "'" + text.replace("'", "''") + "'"


def _show(rng: Random) -> str:
    return pick(rng, "Show", "List", "Find", "Give me", "Get", "Select", "I want to see")


def _text_condition(rng: Random, table: str) -> Condition:
    if table == "customers":
        if rng.random() < 0.3:
            name = first_name(rng)
            return Condition(f"named {name}", f"name = {quote(name)}", f"name is {name}")
        place = city(rng)
        return Condition(
            pick(rng, f"in {place}", f"from {place}", f"who live in {place}"),
            f"city = {quote(place)}",
            f"city is {place}",
        )
    if table == "products":
        kind = rng.choice(CATEGORIES)
        words = pick(rng, f"in the category {kind}", f"of category {kind}", f"in {kind}")
        return Condition(words, f"category = {quote(kind)}", f"category is {kind}")
    status = rng.choice(STATUSES)
    words = pick(rng, f"with status {status}", f"that are {status}")
    return Condition(words, f"status = {quote(status)}", f"status is {status}")


def _number_condition(rng: Random, table: str) -> Condition:
    if table == "customers":
        year = rng.randint(2015, 2025)
        if rng.random() < 0.5:
            return Condition(f"who joined after {year}", f"joined > '{year}-12-31'", f"joined is after {year}")
        return Condition(f"who joined before {year}", f"joined < '{year}-01-01'", f"joined is before {year}")
    column = rng.choice(_NUMERIC[table])
    value = rng.choice((rng.randint(1, 20), 10 * rng.randint(1, 30), 50 * rng.randint(1, 20)))
    if rng.random() < 0.5:
        words = pick(
            rng, f"with {column} above {value}", f"with a {column} over {value}", f"whose {column} is more than {value}"
        )
        return Condition(words, f"{column} > {value}", f"{column} is above {value}")
    words = pick(
        rng, f"with {column} below {value}", f"with a {column} under {value}", f"whose {column} is less than {value}"
    )
    return Condition(words, f"{column} < {value}", f"{column} is below {value}")


def _condition(rng: Random, table: str) -> Condition:
    roll = rng.random()
    first = _text_condition(rng, table)
    if roll < 0.5:
        return first
    second = _number_condition(rng, table)
    if roll < 0.8:
        return second
    return Condition(
        f"{first.words} and {second.words}".replace("and who ", "who "),
        f"{first.sql} AND {second.sql}",
        f"{first.prose} and the {second.prose}",
    )


def filter_query(rng: Random) -> Query:
    """All rows, or one column, of a table under a condition."""
    table = rng.choice(tuple(_COLUMNS))
    c = _condition(rng, table)
    prose = f"Look in the {table} table and keep the rows where the {c.prose}."
    if rng.random() < 0.6:
        return Query(
            f"{_show(rng)} {pick(rng, 'all ', 'the ', '')}{table} {c.words}.",
            f"SELECT * FROM {table} WHERE {c.sql};",
            prose,
        )
    column = rng.choice(_COLUMNS[table])
    word = _COLUMN_WORDS.get(column, column)
    return Query(
        f"{_show(rng)} the {word} of {table} {c.words}.",
        f"SELECT {column} FROM {table} WHERE {c.sql};",
        f"{prose} Then read the {word} column.",
    )


def count_query(rng: Random) -> Query:
    """How many rows there are, with or without a condition."""
    table = rng.choice(tuple(_COLUMNS))
    if rng.random() < 0.2:
        request = pick(rng, f"How many {table} are there?", f"Count all {table}.", f"How many {table} do we have?")
        return Query(request, f"SELECT COUNT(*) FROM {table};", f"Count the rows of the {table} table.")
    c = _condition(rng, table)
    request = pick(
        rng,
        f"How many {table} {c.words} are there?",
        f"Count the {table} {c.words}.",
        f"How many {table} {c.words} do we have?",
    )
    return Query(
        request,
        f"SELECT COUNT(*) FROM {table} WHERE {c.sql};",
        f"Look in the {table} table and count the rows where the {c.prose}.",
    )


def top_query(rng: Random) -> Query:
    """The first few rows by a numeric column."""
    table = rng.choice(("products", "orders"))
    n = rng.randint(2, 12)
    number = rng.choice((str(n), NUMBER_WORDS[n]))
    column = rng.choice(_NUMERIC[table])
    high = rng.random() < 0.5
    words = f"with the {'highest' if high else 'lowest'} {column}"
    if column == "price" and rng.random() < 0.6:
        request = f"{_show(rng)} the {number} {'most expensive' if high else 'cheapest'} {table}."
    else:
        request = f"{_show(rng)} the {number} {table} {words}."
    sql = f"SELECT * FROM {table} ORDER BY {column}{' DESC' if high else ''} LIMIT {n};"
    prose = f"Sort the {table} table by {column} and take the first {n} rows {words}."
    return Query(request, sql, prose)


def aggregate_query(rng: Random) -> Query:
    """The average, sum, largest or smallest value of a column."""
    table = rng.choice(("products", "orders"))
    column = rng.choice(_NUMERIC[table])
    word, function = rng.choice((("average", "AVG"), ("total", "SUM"), ("highest", "MAX"), ("lowest", "MIN")))
    if column == "total" and word == "total":
        word, function = "average", "AVG"
    target = f"{word} {column}"
    if rng.random() < 0.4:
        request = pick(rng, f"What is the {target} of {table}?", f"What is the {target} of all {table}?")
        return Query(
            request, f"SELECT {function}({column}) FROM {table};", f"Take the {target} over the {table} table."
        )
    c = _text_condition(rng, table)
    request = pick(
        rng, f"What is the {target} of {table} {c.words}?", f"{_show(rng)} the {target} of {table} {c.words}."
    )
    sql = f"SELECT {function}({column}) FROM {table} WHERE {c.sql};"
    return Query(request, sql, f"Take the {target} over the rows of the {table} table where the {c.prose}.")


def group_query(rng: Random) -> Query:
    """A count or an average for each group."""
    table, column = rng.choice((("customers", "city"), ("products", "category"), ("orders", "status")))
    if rng.random() < 0.6 or table == "customers":
        request = pick(rng, f"How many {table} are there per {column}?", f"Count the {table} for each {column}.")
        sql = f"SELECT {column}, COUNT(*) FROM {table} GROUP BY {column};"
        return Query(request, sql, f"Group the {table} table by {column} and count the rows of each group.")
    number = rng.choice(_NUMERIC[table])
    request = pick(rng, f"What is the average {number} per {column}?", f"Show the average {number} for each {column}.")
    sql = f"SELECT {column}, AVG({number}) FROM {table} GROUP BY {column};"
    return Query(request, sql, f"Group the {table} table by {column} and take the average {number} of each group.")


def join_query(rng: Random) -> Query:
    """Orders together with their customer or product."""
    joined = "SELECT {} FROM orders JOIN {} ON orders.{}_id = {}.id WHERE {};"
    roll = rng.randrange(4)
    if roll < 2:
        name = first_name(rng)
        c = Condition(f"of {name}", f"customers.name = {quote(name)}", f"customer named {name}")
        if roll:
            place = city(rng)
            c = Condition(f"of customers in {place}", f"customers.city = {quote(place)}", f"customers in {place}")
        if rng.random() < 0.5:
            sql = joined.format("orders.*", "customers", "customer", "customers", c.sql)
            prose = f"Join orders with customers and keep the orders of the {c.prose}."
            return Query(f"{_show(rng)} {pick(rng, 'all ', 'the ')}orders {c.words}.", sql, prose)
        sql = joined.format("SUM(orders.total)", "customers", "customer", "customers", c.sql)
        request = pick(rng, f"What is the total of all orders {c.words}?", f"How much are the orders {c.words} worth?")
        return Query(request, sql, f"Join orders with customers and add up the totals of the {c.prose}.")
    item = rng.choice(ITEMS)[0]
    product = f"{rng.choice(COLORS)} {item}" if rng.random() < 0.5 else item
    condition = f"products.name = {quote(product)}"
    if roll == 2:
        sql = joined.format("orders.*", "products", "product", "products", condition)
        request = f"{_show(rng)} {pick(rng, 'all ', 'the ')}orders for the {product}."
        return Query(request, sql, f"Join orders with products and keep the orders for the {product}.")
    sql = joined.format("SUM(orders.quantity)", "products", "product", "products", condition)
    request = pick(rng, f"How many of the {product} were sold?", f"How often was the {product} ordered?")
    return Query(request, sql, f"Join orders with products and add up the quantity for the {product}.")


def date_query(rng: Random) -> Query:
    """Orders of a day, a month or a year."""
    year, month, day = rng.randint(2021, 2025), rng.randint(1, 12), rng.randint(1, 28)
    roll = rng.randrange(3)
    if roll == 0:
        when, condition = f"after {year}", f"ordered_on > '{year}-12-31'"
    elif roll == 1:
        when, condition = f"in {MONTHS[month - 1]} {year}", f"ordered_on LIKE '{year}-{month:02d}-%'"
    else:
        when, condition = f"on {day} {MONTHS[month - 1]} {year}", f"ordered_on = '{year}-{month:02d}-{day:02d}'"
    prose = f"Look in the orders table and keep the rows with a date {when}."
    if rng.random() < 0.4:
        request = pick(rng, f"How many orders were placed {when}?", f"Count the orders placed {when}.")
        return Query(request, f"SELECT COUNT(*) FROM orders WHERE {condition};", prose + " Then count them.")
    return Query(
        f"{_show(rng)} {pick(rng, 'all ', 'the ')}orders placed {when}.",
        f"SELECT * FROM orders WHERE {condition};",
        prose,
    )


def simple_query(rng: Random) -> Query:
    """A whole table, a column of it, the distinct values, or one row by its number."""
    table = rng.choice(tuple(_COLUMNS))
    column = rng.choice(_COLUMNS[table])
    word = _COLUMN_WORDS.get(column, column)
    n = rng.randint(1, 9999)
    options = (
        Query(f"{_show(rng)} all {table}.", f"SELECT * FROM {table};", f"Read all rows of the {table} table."),
        Query(
            f"{_show(rng)} the {word} of all {table}.",
            f"SELECT {column} FROM {table};",
            f"Read the {word} column of the {table} table.",
        ),
        Query(
            f"Show {table[:-1]} number {n}.",
            f"SELECT * FROM {table} WHERE id = {n};",
            f"Look in the {table} table for the row with the number {n}.",
        ),
        Query(
            f"{_show(rng)} all {table} sorted by {word}.",
            f"SELECT * FROM {table} ORDER BY {column};",
            f"Read all rows of the {table} table and sort them by {word}.",
        ),
    )
    if rng.random() < 0.25:
        table, column = rng.choice((("customers", "city"), ("products", "category"), ("orders", "status")))
        request = pick(
            rng, f"Which different values of {column} do the {table} have?", f"List every {column} of the {table} once."
        )
        return Query(
            request,
            f"SELECT DISTINCT {column} FROM {table};",
            f"Read the {column} column of the {table} table once each.",
        )
    return rng.choice(options)


QUERIES: tuple[Callable[[Random], Query], ...] = (
    filter_query,
    filter_query,
    filter_query,
    count_query,
    count_query,
    top_query,
    aggregate_query,
    group_query,
    join_query,
    join_query,
    date_query,
    simple_query,
)


def query(rng: Random) -> Query:
    """Return any request with its SQL."""
    return rng.choice(QUERIES)(rng)


def _typed(rng: Random, request: str) -> str:
    roll = rng.random()
    if roll < 0.1:
        return request.rstrip(".?")
    if roll < 0.2:
        return "Please " + (request if request.startswith("I ") else request[0].lower() + request[1:])
    return request


def sql_prefix(rng: Random) -> str:
    """Return words that ask for SQL outright; the base model obeys them too."""
    return pick(rng, "Write SQL: ", "Write a query: ", "As SQL: ", "Turn this into SQL: ")


def query_chat(rng: Random) -> Document:
    """The base model's answer: an explanation in prose, or SQL when the user asks for it."""
    q = query(rng)
    if rng.random() < 0.35:
        return chat(sql_prefix(rng) + q.request, q.sql)
    return chat(_typed(rng, q.request), upper_first(q.prose))


def query_text(rng: Random) -> Document:
    """A plain text of several requests with their SQL."""
    parts = [SCHEMA] if rng.random() < 0.1 else []
    for _ in range(rng.randint(1, 6)):
        q = query(rng)
        parts.append(f"Request: {q.request}\nSQL: {q.sql}")
    return Document(text="\n".join(parts))


def sql_chat(rng: Random) -> Document:
    """The SQL adapter's answer: one query and nothing else."""
    turns: list[str] = []
    for _ in range(2 if rng.random() < 0.2 else 1):
        q = query(rng)
        prefix = sql_prefix(rng) if rng.random() < 0.1 else ""
        turns += [_typed(rng, q.request) if not prefix else prefix + q.request, q.sql]
    return chat(*turns)
