"""Word lists and random values that the generators draw from."""

from random import Random

_FIRST_NAMES = """
Anna Ben Clara David Elena Felix Greta Hugo Ines Jonas Karin Leo Maria Nils Olga Pavel Quentin Rosa Samir Tara
Ulrich Vera Walter Xenia Yusuf Zoe Amara Bruno Chen Dalia Emil Farah Gabriel Hana Ivan Julia Kofi Lena Marco Nadia
Omar Paula Rafael Sofia Tomas Uma Victor Wendy Yara Zane Aisha Boris Carmen Diego Eva Fatima George Helen Igor
Jasmine Kenji Laura Miguel Nora Oscar Priya Ravi Sara Theo Ursula Viktor Willa Yuki Zara Alice Bob Carol Dan Emma
Frank Grace Henry Isabel Jack Kate Liam Mia Noah Olivia Peter Ruth Simon Tina Vincent Lucy Adam Beatrice Carlos Dora
Erik Fiona Gustav Heidi Ida Jamal Kira Linus Mona Naomi Otto Petra Rania Stefan Tess Umar Viola Wanda Axel Birgit
José Zoë André Renée Søren Chloé Jürgen Małgorzata Anaïs Björn
"""
_LAST_NAMES = """
Miller Smith Novak Garcia Rossi Silva Jansen Berg Costa Dubois Fischer Gomez Hansen Ito Jones Kowalski Lopez Meyer
Nakamura Olsen Petrov Quinn Rivera Santos Tanaka Ueda Vargas Weber Young Zhang Okafor Mensah Patel Khan Kim Park Lee
Moreau Lindqvist Horvat Popescu Castro Farouk Haddad Brown Taylor
"""
_CITIES = """
Lisbon|Porto|Madrid|Seville|Paris|Lyon|Rome|Milan|Berlin|Hamburg|Munich|Vienna|Zurich|Geneva|Prague|Warsaw|Krakow
Budapest|Athens|Oslo|Bergen|Stockholm|Helsinki|Copenhagen|Dublin|London|Leeds|Glasgow|Brussels|Ghent|Amsterdam|Utrecht
New York|Boston|Chicago|Denver|Austin|Seattle|Toronto|Montreal|Vancouver|Mexico City|Lima|Bogota|Santiago|Quito
Cairo|Tunis|Nairobi|Accra|Lagos|Dakar|Cape Town|Rabat|Tokyo|Osaka|Kyoto|Seoul|Busan|Beijing|Shanghai|Hanoi|Bangkok
Jakarta|Delhi|Mumbai|Sydney|Perth|Melbourne|Auckland|Wellington|Istanbul|Ankara|Riga|Tallinn|Vilnius|Turin|Naples
Valencia|Bristol|Cologne|Leipzig|Dallas|Miami|Portland|Florence
"""
# item|plural|category|price in euros
_ITEMS = """
lamp|lamps|lighting|34
candle|candles|lighting|6
lantern|lanterns|lighting|28
kettle|kettles|kitchen|39
mug|mugs|kitchen|8
teapot|teapots|kitchen|24
plate|plates|kitchen|9
knife|knives|kitchen|19
toaster|toasters|kitchen|45
chair|chairs|furniture|79
desk|desks|furniture|189
table|tables|furniture|149
shelf|shelves|furniture|59
stool|stools|furniture|35
sofa|sofas|furniture|499
backpack|backpacks|travel|65
suitcase|suitcases|travel|99
umbrella|umbrellas|travel|18
tent|tents|outdoor|129
bicycle|bicycles|outdoor|349
helmet|helmets|outdoor|49
football|footballs|sports|22
racket|rackets|sports|54
notebook|notebooks|office|5
pen|pens|office|3
printer|printers|office|119
keyboard|keyboards|electronics|69
headphones|headphones|electronics|89
camera|cameras|electronics|259
speaker|speakers|electronics|75
phone|phones|electronics|399
monitor|monitors|electronics|199
jacket|jackets|clothing|85
scarf|scarves|clothing|17
sweater|sweaters|clothing|48
hat|hats|clothing|21
shirt|shirts|clothing|29
blanket|blankets|bedroom|32
pillow|pillows|bedroom|23
mirror|mirrors|bedroom|44
vase|vases|decoration|26
clock|clocks|decoration|31
puzzle|puzzles|toys|15
kite|kites|toys|13
robot|robots|toys|55
"""
_SYLLABLES = (
    "ba be bo da del dor el fa fen ga gri ha hol in ja jo ka kel la lin lo ma mar mi na nor "
    "o pa per qui ra rin sa sel tan tor ul va vel wi xan ya zan zo"
).split()

FIRST_NAMES = _FIRST_NAMES.split()
LAST_NAMES = _LAST_NAMES.split()
CITIES = [city for line in _CITIES.strip().splitlines() for city in line.split("|")]
ITEMS = [tuple(line.split("|")) for line in _ITEMS.strip().splitlines()]
CATEGORIES = sorted({item[2] for item in ITEMS})
COLORS = "red blue green black white yellow grey brown pink purple orange silver".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
JOBS = (
    "teacher nurse baker engineer pilot farmer gardener painter doctor lawyer carpenter chef driver librarian musician "
    "photographer plumber programmer scientist writer tailor translator"
).split()
HOBBIES = (
    "painting|chess|swimming|cooking|hiking|reading|dancing|fishing|gardening|running|singing|cycling|photography|"
    "climbing|knitting|tennis|football|sailing|yoga|board games"
).split("|")
FOODS = "soup|rice|pasta|salad|bread|pancakes|fish|curry|pizza|noodles|beans|cake|apples|cheese".split("|")
TOPICS = (
    "the budget|the new website|the summer plan|the hiring plan|the product launch|the school trip|the annual report|"
    "the design review|the garden project|the moving plan|the customer survey|the training week|the book club"
).split("|")
ROOMS = (
    "room 4|the library|the main hall|the blue room|the cafe|room 12|the garden|the office|room 7|the kitchen"
).split("|")
WEATHER = "sunny|cloudy|rainy|snowy|foggy|windy|stormy|clear".split("|")
AIRLINES = "Air Nova|Blue Sky|Sunwing|North Air|Globe Air|Swift Air".split("|")
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def invented_word(rng: Random, parts: int | None = None) -> str:
    """Return a pronounceable word that is in no list, so that copying must be learned and not recall."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(parts or rng.choice((2, 2, 3))))


def first_name(rng: Random) -> str:
    """Return a first name; one in four is invented."""
    return invented_word(rng).capitalize() if rng.random() < 0.25 else rng.choice(FIRST_NAMES)


def full_name(rng: Random) -> str:
    """Return a first and a last name."""
    last = invented_word(rng).capitalize() if rng.random() < 0.2 else rng.choice(LAST_NAMES)
    return f"{first_name(rng)} {last}"


def person(rng: Random) -> str:
    """Return a first name, or sometimes a full one."""
    return full_name(rng) if rng.random() < 0.25 else first_name(rng)


def city(rng: Random) -> str:
    """Return a city; one in eight is invented."""
    return invented_word(rng).capitalize() if rng.random() < 0.12 else rng.choice(CITIES)


def clock(rng: Random) -> str:
    """Return a time of day such as ``14:30``."""
    return f"{rng.randint(7, 21)}:{rng.choice(('00', '15', '30', '45'))}"


def date(rng: Random) -> str:
    """Return a date such as ``12 May``."""
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"


def order_number(rng: Random) -> str:
    """Return an order number of four or five digits."""
    return str(rng.randint(1000, 99999))


def amount(rng: Random) -> int:
    """Return a price: small ones are more frequent."""
    return rng.randint(2, rng.choice((20, 60, 200, 900)))


def article(word: str) -> str:
    """Return the word with ``a`` or ``an`` before it (``headphones`` takes none)."""
    if word.endswith("headphones"):
        return word
    return ("an " if word[0] in "aeiouAEIOU" else "a ") + word


def listing(words: list[str]) -> str:
    """Join words as ``a, b and c``."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
