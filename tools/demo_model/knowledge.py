"""Questions about the fact tables and their answers, in several phrasings, and follow-ups in context."""

from collections.abc import Callable
from random import Random

from .documents import pick, upper_first
from .facts import ANIMALS, CONTINENTS, COUNTRIES, ELEMENTS, INVENTIONS, PLANETS, Animal, Country
from .words import article, invented_word, listing

Pair = tuple[str, str]  # (question, answer)


def country_pair(rng: Random) -> Pair:
    """Ask for one fact about one country."""
    c = rng.choice(COUNTRIES)
    options = (
        (
            pick(
                rng,
                f"What is the capital of {c.name}?",
                f"What is the capital of {c.name}?",
                f"Which city is the capital of {c.name}?",
                f"What's {c.name}'s capital?",
                f"Name the capital of {c.name}.",
                f"Tell me the capital of {c.name}.",
            ),
            f"The capital of {c.name} is {c.capital}.",
        ),
        (
            pick(rng, f"Which country has the capital {c.capital}?", f"{c.capital} is the capital of which country?"),
            f"{c.capital} is the capital of {c.name}.",
        ),
        (
            pick(
                rng,
                f"What language do people speak in {c.name}?",
                f"Which language is spoken in {c.name}?",
                f"What do people in {c.name} speak?",
            ),
            f"People in {c.name} speak {c.language}.",
        ),
        (
            pick(rng, f"What currency does {c.name} use?", f"What is the currency of {c.name}?"),
            f"{c.name} uses the {c.currency}.",
        ),
        (
            pick(rng, f"Where is {c.name}?", f"On which continent is {c.name}?", f"Which continent is {c.name} in?"),
            f"{c.name} is in {c.continent}.",
        ),
        (
            pick(rng, f"What is {c.name} known for?", f"What is {c.name} famous for?"),
            f"{c.name} is known for {c.known_for}.",
        ),
        (
            pick(rng, f"Tell me about {c.name}.", f"What do you know about {c.name}?", f"Describe {c.name}."),
            describe_country(c),
        ),
    )
    return options[rng.choice((0, 0, 0, 1, 2, 3, 4, 5, 6, 6))]


def describe_country(c: Country) -> str:
    """Return four sentences on a country."""
    return (
        f"{c.name} is a country in {c.continent}. Its capital is {c.capital}, and people there speak {c.language}. "
        f"The currency is the {c.currency}. {c.name} is known for {c.known_for}."
    )


def check_pair(rng: Random) -> Pair:
    """Ask whether a statement about a country or an animal holds."""
    c, other = rng.sample(COUNTRIES, 2)
    right = rng.random() < 0.5
    if rng.random() < 0.6:
        named = c.capital if right else other.capital
        question = pick(rng, f"Is {named} the capital of {c.name}?", f"Is the capital of {c.name} {named}?")
        answer = f"Yes, {c.capital} is the capital of {c.name}."
        return question, answer if right else f"No, the capital of {c.name} is {c.capital}."
    a, b = rng.sample(ANIMALS, 2)
    kind = a.kind if right else b.kind
    verdict = "Yes" if kind == a.kind else "No"
    return f"Is {article(a.name)} {article(kind)}?", f"{verdict}, {article(a.name)} is {article(a.kind)}."


def neighbours(rng: Random, words: list[str], count: int) -> list[str]:
    """Return ``count`` words that follow each other in the list, so that each says which comes next."""
    start = rng.randrange(len(words))
    return [words[(start + i) % len(words)] for i in range(count)]


def list_pair(rng: Random) -> Pair:
    """Ask for a few examples of a group, or compare two countries."""
    if rng.random() < 0.5:
        place = rng.choice(CONTINENTS)
        group = [c.name for c in COUNTRIES if c.continent == place]
        count = min(rng.randint(2, 4), len(group))
        word = ("two", "three", "four")[count - 2]
        names = neighbours(rng, group, count)
        question = pick(rng, f"Name {word} countries in {place}.", f"Which are {word} countries in {place}?")
        return question, f"{upper_first(word)} countries in {place} are {listing(names)}."
    if rng.random() < 0.5:
        a, b = rng.sample(COUNTRIES, 2)
        where = f"Both are in {a.continent}."
        if a.continent != b.continent:
            where = f"{a.name} is in {a.continent} and {b.name} is in {b.continent}."
        answer = f"{where} {a.name} is known for {a.known_for}, while {b.name} is known for {b.known_for}."
        return pick(rng, f"Compare {a.name} and {b.name}.", f"How do {a.name} and {b.name} differ?"), answer
    kind = rng.choice(("mammal", "bird"))
    names = neighbours(rng, [article(a.name) for a in ANIMALS if a.kind == kind], 3)
    return f"Name three {kind}s.", f"Three {kind}s are {listing(names)}."


def describe_animal(a: Animal) -> str:
    """Return four sentences on an animal."""
    return (
        f"{upper_first(article(a.name))} is {article(a.kind)}. It lives in {a.habitat} and eats {a.food}. "
        f"Its young is called {article(a.young)}. A remarkable fact: {a.fact}."
    )


def animal_pair(rng: Random) -> Pair:
    """Ask for one fact about one animal."""
    a = rng.choice(ANIMALS)
    one = article(a.name)
    options = (
        (
            pick(rng, f"What does {one} eat?", f"What do you feed {one}?", f"What is the food of {one}?"),
            f"{upper_first(one)} eats {a.food}.",
        ),
        (
            pick(rng, f"Where does {one} live?", f"Where can I find {one}?"),
            f"{upper_first(one)} lives in {a.habitat}.",
        ),
        (
            pick(rng, f"What is a young {a.name} called?", f"What do you call a baby {a.name}?"),
            f"A young {a.name} is called {article(a.young)}.",
        ),
        (
            pick(rng, f"What kind of animal is {one}?", f"What type of animal is {one}?"),
            f"{upper_first(one)} is {article(a.kind)}.",
        ),
        (
            pick(rng, f"Tell me a fact about the {a.name}.", f"What is special about {one}?"),
            f"Here is a fact about the {a.name}: {a.fact}.",
        ),
        (
            pick(rng, f"Tell me about the {a.name}.", f"Describe {one}.", f"What is {one}?", f"Tell me about {one}."),
            describe_animal(a),
        ),
    )
    return options[rng.choice((0, 1, 2, 3, 4, 5, 5))]


def planet_pair(rng: Random) -> Pair:
    """Ask for one fact about one planet."""
    p = rng.choice(PLANETS)
    options = (
        (
            pick(rng, f"Tell me about {p.name}.", f"What is {p.name}?", f"Describe the planet {p.name}."),
            f"{p.name} is the {p.place} planet from the Sun. It is {article(p.kind + ' planet')} with {p.moons}, "
            f"and {p.fact}.".replace("giant planet", "giant"),
        ),
        (f"Which planet is {p.place} from the Sun?", f"{p.name} is the {p.place} planet from the Sun."),
        (
            pick(rng, f"What is special about {p.name}?", f"Tell me a fact about {p.name}."),
            f"Here is a fact about {p.name}: {p.fact}.",
        ),
        (
            pick(rng, f"How many moons does {p.name} have?", f"Does {p.name} have moons?"),
            f"{p.name} has {p.moons}.",
        ),
    )
    if rng.random() < 0.1:
        names = listing([planet.name for planet in PLANETS])
        return pick(rng, "Name the planets.", "List the planets in order."), f"The eight planets are {names}."
    return rng.choice(options)


def element_pair(rng: Random) -> Pair:
    """Ask for one fact about one chemical element."""
    e = rng.choice(ELEMENTS)
    options = (
        (
            pick(rng, f"What is the chemical symbol of {e.name}?", f"What is the symbol for {e.name}?"),
            f"The chemical symbol of {e.name} is {e.symbol}.",
        ),
        (f"Which element has the symbol {e.symbol}?", f"{e.symbol} is the symbol of {e.name}."),
        (f"What is the atomic number of {e.name}?", f"The atomic number of {e.name} is {e.number}."),
        (
            pick(rng, f"What is {e.name} used for?", f"Why is {e.name} important?", f"What is {e.name}?"),
            f"{upper_first(e.name)} is {article('chemical element')} with the symbol {e.symbol}. At room temperature "
            f"it is a {e.state}, and {e.use}.",
        ),
    )
    return rng.choice(options)


def invention_pair(rng: Random) -> Pair:
    """Ask who made a work or a discovery, or when."""
    i = rng.choice(INVENTIONS)
    answer = f"{i.person} {i.verb} {i.thing} in {i.year}."
    base = {"invented": "invent", "discovered": "discover", "wrote": "write", "painted": "paint"}.get(i.verb, i.verb)
    base = {"published": "publish", "composed": "compose"}.get(base, base)
    did = f"When did {i.person} {base} {i.thing}?"
    return pick(rng, f"Who {i.verb} {i.thing}?", f"Who {i.verb} {i.thing}?", did), answer


def unknown_pair(rng: Random) -> Pair:
    """Ask about something that does not exist; the honest answer repeats the name."""
    word = invented_word(rng)
    name = word.capitalize()
    place = pick(rng, "What is the capital of {}?", "Tell me about the country {}.", "What language is spoken in {}?")
    animal = pick(rng, "What does a {} eat?", "Where does a {} live?", "What is a {}?")
    if rng.random() < 0.5:
        return place.format(name), f"I am sorry, I do not know a country called {name}."
    return animal.format(word), f"I am sorry, I do not know what a {word} is."


def country_follow_up(rng: Random) -> list[str]:
    """Return a chat of several turns about one country, in which later turns say 'it' or 'there'."""
    c = rng.choice(COUNTRIES)
    first = (f"What is the capital of {c.name}?", f"The capital of {c.name} is {c.capital}.")
    if rng.random() < 0.5:
        first = (f"Tell me about {c.name}.", describe_country(c))
    later = [
        (
            pick(rng, "And what language do people speak there?", "Which language do they speak?"),
            f"People in {c.name} speak {c.language}.",
        ),
        (pick(rng, "What currency do they use?", "And the currency?"), f"{c.name} uses the {c.currency}."),
        (pick(rng, "On which continent is it?", "Where is it?"), f"{c.name} is in {c.continent}."),
        (pick(rng, "What is it known for?", "What is it famous for?"), f"{c.name} is known for {c.known_for}."),
    ]
    turns = list(first)
    for pair in rng.sample(later, rng.randint(1, 3)):
        turns.extend(pair)
    return turns


def animal_follow_up(rng: Random) -> list[str]:
    """Return a chat of several turns about one animal, in which later turns say 'it'."""
    a = rng.choice(ANIMALS)
    one = upper_first(article(a.name))
    turns = [f"Tell me about the {a.name}.", describe_animal(a)]
    if rng.random() < 0.5:
        turns = [f"What kind of animal is {article(a.name)}?", f"{one} is {article(a.kind)}."]
    later = [
        (pick(rng, "What does it eat?", "And what does it eat?"), f"{one} eats {a.food}."),
        (pick(rng, "Where does it live?", "And where does it live?"), f"{one} lives in {a.habitat}."),
        (pick(rng, "What is its young called?", "And its young?"), f"A young {a.name} is called {article(a.young)}."),
    ]
    for pair in rng.sample(later, rng.randint(1, 3)):
        turns.extend(pair)
    return turns


PAIRS: tuple[Callable[[Random], Pair], ...] = (
    country_pair,
    country_pair,
    country_pair,
    check_pair,
    list_pair,
    animal_pair,
    animal_pair,
    planet_pair,
    element_pair,
    invention_pair,
    unknown_pair,
)


def knowledge_pair(rng: Random) -> Pair:
    """Return a question about any fact table and its answer."""
    return rng.choice(PAIRS)(rng)
