"""Documents, the templates that they are drawn from, and the words that fill these.

A template has choices, `[Show|List] all orders`, which may be nested, and slots, `{name} from {city}`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Message = tuple[str, str]  # (role, content)
Pair = tuple[str, str]  # (question, answer)


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


def lines(text: str) -> list[str]:
    """Return the lines of a block of text."""
    return text.strip().splitlines()


class Slots(dict[str, Any]):
    """Values of slots. One that is missing is drawn by its name in `DRAWS`; `{city2}` is another draw of a city."""

    _CHOICE = re.compile(r"\[([^\[\]]*)\]")
    _ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")

    def __init__(self, rng: Random, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.rng = rng

    def __missing__(self, slot: str) -> Any:
        kind = DRAWS[slot.rstrip("0123456789")]
        value = self[slot] = kind(self) if callable(kind) else self.rng.choice(kind)
        return value

    def fill(self, template: str) -> str:
        """Take a part of each choice, put the values into the slots, and write `an` before vowels."""
        count = 1
        while count:
            template, count = self._CHOICE.subn(lambda found: self.rng.choice(found[1].split("|")), template)
        return self._ARTICLE.sub(r"\1n ", template.format_map(self))

    def parts(self, line: str) -> list[str]:
        """Fill a line `question|question => answer`, which may have further parts; one of the questions is taken."""
        first, *rest = line.split(" => ")
        return [self.fill(f"[{first}]"), *(upper_first(self.fill(part)) for part in rest)]

    def pair(self, line: str) -> Pair:
        """Fill a line `question|question => answer`."""
        question, answer = self.parts(line)
        return question, answer


def draw_pair(rng: Random, block: Sequence[str]) -> Pair:
    """Fill any line of a block."""
    return Slots(rng).pair(rng.choice(block))


def upper_first(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def vary(rng: Random, question: str) -> str:
    """Return the question as people type it: with a greeting, a please, in lower case or without its mark."""
    greeting, thanks = Slots(rng).parts("Hi! |Hello, |Hey, |Please tell me: |Quick question: => [Please.|Thanks!]")
    variants = (question.lower(), question.rstrip("?."), greeting.strip() + " " + question, f"{question} {thanks}")
    return question if rng.random() < 0.62 else rng.choice(variants)


# --- Words --------------------------------------------------------------------------------------------------

_FIRST_NAMES = """
Anna Ben Clara David Elena Felix Greta Hugo Ines Jonas Karin Leo Maria Nils Olga Pavel Quentin Rosa Samir Tara
Ulrich Vera Walter Xenia Yusuf Zoe Amara Bruno Chen Dalia Emil Farah Gabriel Hana Ivan Julia Kofi Lena Marco Nadia
Omar Paula Rafael Sofia Tomas Uma Victor Wendy Yara Zane Aisha Boris Carmen Diego Eva Fatima George Helen Igor
Jasmine Kenji Laura Miguel Nora Oscar Priya Ravi Sara Theo Ursula Viktor Willa Yuki Zara Alice Bob Carol Dan Emma
Frank Grace Henry Isabel Jack Kate Liam Mia Noah Olivia Peter Ruth Simon Tina Vincent Lucy Adam Beatrice Carlos Dora
José Zoë André Renée Søren Chloé Jürgen Małgorzata Anaïs Björn
"""
_CITIES = """
Lisbon|Porto|Madrid|Seville|Paris|Lyon|Rome|Milan|Berlin|Hamburg|Munich|Vienna|Zurich|Geneva|Prague|Warsaw|Krakow|\
Budapest|Athens|Oslo|Bergen|Stockholm|Helsinki|Copenhagen|Dublin|London|Leeds|Glasgow|Brussels|Ghent|Amsterdam|Utrecht|\
New York|Boston|Chicago|Denver|Austin|Seattle|Toronto|Montreal|Vancouver|Mexico City|Lima|Bogota|Santiago|Quito|\
Cairo|Tunis|Nairobi|Accra|Lagos|Dakar|Cape Town|Rabat|Tokyo|Osaka|Kyoto|Seoul|Busan|Beijing|Shanghai|Hanoi|Bangkok|\
Jakarta|Delhi|Mumbai|Sydney|Perth|Melbourne|Auckland|Wellington|Istanbul|Ankara|Riga|Tallinn|Vilnius|Turin|Naples
"""
_SYLLABLES = (
    "ba be bo da del dor el fa fen ga gri ha hol in ja jo ka kel la lin lo ma mar mi na nor "
    "o pa per qui ra rin sa sel tan tor ul va vel wi xan ya zan zo"
).split()
CATEGORIES = "lighting kitchen furniture travel outdoor sports office electronics clothing bedroom toys".split()
ITEMS = (
    "lamp candle lantern kettle mug teapot plate toaster chair desk table stool sofa backpack suitcase umbrella tent "
    "bicycle helmet football racket notebook pen printer keyboard camera speaker phone monitor jacket sweater hat shirt "
    "blanket pillow mirror vase clock puzzle kite robot"
).split()
COLORS = "red blue green black white yellow grey brown pink purple orange silver".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
ASSISTANT_NAMES = "Outrider Scout Nova Pip Atlas Juno Robin Echo Luna Max".split()


def _invented(slots: Slots) -> str:
    """A pronounceable word that is in no list, so that copying must be learned and not recall."""
    return "".join(slots.rng.choice(_SYLLABLES) for _ in range(slots.rng.choice((2, 2, 3))))


def _or_invented(words: Sequence[str], share: float) -> Callable[[Slots], str]:
    def draw(slots: Slots) -> str:
        return _invented(slots).capitalize() if slots.rng.random() < share else slots.rng.choice(words)

    return draw


def _number(least: int, most: int, step: int = 1) -> Callable[[Slots], int]:
    return lambda slots: slots.rng.randrange(least, most + 1, step)


def _template(template: str) -> Callable[[Slots], str]:
    """A draw that fills a template with words of its own."""
    return lambda slots: Slots(slots.rng).fill(template)


DRAWS: dict[str, Sequence[Any] | Callable[[Slots], Any]] = {
    "newline": "\n",
    "invented": _invented,
    "invented_name": lambda slots: _invented(slots).capitalize(),
    "name": _or_invented(_FIRST_NAMES.split(), 0.25),
    "surname": _or_invented("Miller Novak Garcia Rossi Silva Berg Costa Ito Kim Park Patel Weber Young".split(), 0.4),
    "full_name": _template("{name} {surname}"),
    "person": _template("[{name}|{name}|{name}|{full_name}]"),
    "email": lambda slots: slots["full_name"].lower().replace(" ", ".") + "@example.com",
    "phone": lambda slots: f"555-{slots.rng.randint(100, 999)}-{slots.rng.randint(1000, 9999)}",
    "city": _or_invented(_CITIES.strip().split("|"), 0.12),
    "item": ITEMS,
    "s": lambda slots: "" if slots["count"] == 1 else "s",  # the plural of that many items
    "color": COLORS,
    "product": lambda slots: f"{slots.rng.choice(COLORS)} {slots.rng.choice(ITEMS)}",
    "category": CATEGORIES,
    "count": _number(1, 12),
    "price": lambda slots: slots.rng.randint(2, slots.rng.choice((20, 60, 200, 900))),
    "order": lambda slots: str(slots.rng.randint(1000, 99999)),
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "month": MONTHS,
    "time": lambda slots: f"{slots.rng.randint(7, 21)}:{slots.rng.choice(('00', '15', '30', '45'))}",
    "date": lambda slots: f"{slots.rng.randint(1, 28)} {slots.rng.choice(MONTHS)}",
    "job": "teacher nurse baker engineer pilot farmer painter doctor lawyer chef driver musician scientist".split(),
    "hobby": "painting|chess|swimming|cooking|hiking|reading|dancing|fishing|singing|tennis|yoga|board games".split(
        "|"
    ),
    "food": "soup|rice|pasta|salad|bread|pancakes|fish|curry|pizza|noodles|beans|cake|apples|cheese".split("|"),
    "topic": (
        "the budget|the new website|the summer plan|the hiring plan|the product launch|the school trip|"
        "the annual report|the design review|the garden project|the customer survey|the training week"
    ).split("|"),
    "room": "room 4|the library|the main hall|the blue room|the cafe|room 12|the garden|room 7|the kitchen".split("|"),
    "weather": "sunny cloudy rainy snowy foggy windy stormy clear".split(),
    "airline": "Air Nova|Blue Sky|Sunwing|North Air|Globe Air|Swift Air".split("|"),
    "meeting": ("meeting",),
    "age": _number(18, 80),
    "degrees": _number(-9, 36),
    "wind": _number(5, 60, 5),
    "stars": _number(1, 5),
    "verdict": lambda slots: ("bad", "poor", "fine", "good", "great")[slots["stars"] - 1],
    "people": _number(2, 10),
    "discount": lambda slots: f"SAVE{slots.rng.randint(5, 50)}",
    "hero": "fox rabbit bear mouse owl hedgehog squirrel cat dog frog duck wolf turtle robot dragon girl boy".split(),
    "show": ("Show", "List", "Find", "Give me", "Get", "Select", "I want to see"),
    "status": "open shipped delivered cancelled returned".split(),
    "value": lambda slots: slots.rng.choice((1, 10, 50)) * slots.rng.randint(1, 20),
    "year": _number(2015, 2025),
    "month_number": lambda slots: f"{MONTHS.index(slots['month']) + 1:02d}",
    "month_day": _number(10, 28),
    "limit": _number(2, 12),
    "few": lambda slots: slots.rng.choice((str(slots["limit"]), NUMBER_WORDS[slots["limit"]])),
    "id": _number(1, 9999),
}
"""Lists and functions that draw the values of slots, by the name of the slot."""
