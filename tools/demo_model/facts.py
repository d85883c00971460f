"""Facts that the demo model learns, and questions about them: countries, animals, planets, elements and inventions.

A table is a block of text with one row a line and ``|`` between the fields; the first line names the slots.
"""

from random import Random

from .templates import Document, Pair, Slots, chat, draw_pair, lines, upper_first

Row = dict[str, str]


def _table(block: str) -> list[Row]:
    fields, *rows = (line.split("|") for line in lines(block))
    return [dict(zip(fields, row, strict=True)) for row in rows]


COUNTRIES = _table("""
country|capital|continent|language|currency|known_for
France|Paris|Europe|French|euro|the Eiffel Tower and fresh bread
Spain|Madrid|Europe|Spanish|euro|sunny beaches and flamenco
Portugal|Lisbon|Europe|Portuguese|euro|old trams and custard tarts
Italy|Rome|Europe|Italian|euro|pizza, pasta and the Colosseum
Germany|Berlin|Europe|German|euro|castles and fast cars
Greece|Athens|Europe|Greek|euro|ancient temples and blue seas
Finland|Helsinki|Europe|Finnish|euro|forests, lakes and saunas
Sweden|Stockholm|Europe|Swedish|krona|deep forests and clever design
Norway|Oslo|Europe|Norwegian|krone|fjords and northern lights
Denmark|Copenhagen|Europe|Danish|krone|bicycles and toy bricks
Iceland|Reykjavik|Europe|Icelandic|krona|volcanoes and hot springs
Ireland|Dublin|Europe|English|euro|green hills and folk music
Poland|Warsaw|Europe|Polish|zloty|old towns and dumplings
Japan|Tokyo|Asia|Japanese|yen|cherry blossoms and fast trains
China|Beijing|Asia|Mandarin Chinese|yuan|the Great Wall and tea
South Korea|Seoul|Asia|Korean|won|technology and kimchi
Thailand|Bangkok|Asia|Thai|baht|golden temples and street food
Indonesia|Jakarta|Asia|Indonesian|rupiah|thousands of islands and volcanoes
Turkey|Ankara|Asia|Turkish|lira|bazaars and strong coffee
Egypt|Cairo|Africa|Arabic|pound|the pyramids and the Nile
Morocco|Rabat|Africa|Arabic|dirham|colourful markets and the Sahara
Kenya|Nairobi|Africa|Swahili|shilling|lions and wide savannas
Ghana|Accra|Africa|English|cedi|cocoa and bright cloth
Nigeria|Abuja|Africa|English|naira|music and film
Canada|Ottawa|North America|English and French|dollar|maple syrup and great lakes
Mexico|Mexico City|North America|Spanish|peso|tacos and ancient pyramids
Cuba|Havana|North America|Spanish|peso|old cars and salsa music
Costa Rica|San Jose|North America|Spanish|colon|rainforests and wildlife
Brazil|Brasilia|South America|Portuguese|real|football and the Amazon rainforest
Argentina|Buenos Aires|South America|Spanish|peso|tango and wide plains
Chile|Santiago|South America|Spanish|peso|the Atacama Desert and the Andes
Peru|Lima|South America|Spanish|sol|Machu Picchu and llamas
Colombia|Bogota|South America|Spanish|peso|coffee and emeralds
Australia|Canberra|Oceania|English|dollar|kangaroos and coral reefs
New Zealand|Wellington|Oceania|English|dollar|green valleys and sheep
Fiji|Suva|Oceania|English|dollar|warm lagoons and coral
""")
ANIMALS = _table("""
animal|kind|habitat|food|young|fact
lion|mammal|the savanna|meat|cub|it lives in a family group called a pride
tiger|mammal|forests|meat|cub|no two tigers have the same stripes
elephant|mammal|savannas and forests|grass, leaves and bark|calf|it is the largest animal on land
giraffe|mammal|the savanna|leaves|calf|it is the tallest animal in the world
polar bear|mammal|the Arctic|seals|cub|its skin is black under its white fur
panda|mammal|mountain forests|bamboo|cub|it can eat for twelve hours a day
koala|mammal|eucalyptus forests|eucalyptus leaves|joey|it sleeps for about twenty hours a day
kangaroo|mammal|grasslands|grass|joey|it carries its young in a pouch
wolf|mammal|forests and tundra|meat|pup|it hunts together with its pack
fox|mammal|forests and fields|small animals and berries|kit|it can hear a mouse under the snow
rabbit|mammal|meadows|grass and vegetables|kit|its front teeth never stop growing
horse|mammal|grasslands|grass and hay|foal|it can sleep standing up
camel|mammal|deserts|dry plants|calf|it stores fat in its hump
dolphin|mammal|the sea|fish|calf|it finds its way with sound
otter|mammal|rivers and coasts|fish and shellfish|pup|it often holds hands while it sleeps
penguin|bird|cold southern coasts|fish|chick|it cannot fly but swims very well
owl|bird|forests|mice and insects|owlet|it can turn its head almost all the way around
eagle|bird|mountains|fish and small animals|eaglet|it has excellent eyesight
parrot|bird|rainforests|fruit and seeds|chick|it can copy human speech
crocodile|reptile|rivers and swamps|fish and meat|hatchling|it has the strongest bite of all animals
turtle|reptile|the sea|jellyfish and sea grass|hatchling|it returns to the beach where it was born
frog|amphibian|ponds and wet forests|insects|tadpole|it drinks through its skin
shark|fish|the sea|fish and seals|pup|it has existed longer than trees
salmon|fish|rivers and the sea|insects and small fish|fry|it swims back to the river where it was born
octopus|mollusc|the sea floor|crabs|larva|it has three hearts and eight arms
bee|insect|meadows and gardens|nectar and pollen|larva|it dances to show others where flowers are
butterfly|insect|gardens and meadows|nectar|caterpillar|it tastes with its feet
spider|arachnid|webs and corners|insects|spiderling|its silk is stronger than steel of the same weight
""")
PLANETS = _table("""
planet|place|kind|moons|fact
Mercury|first|rocky planet|no moons|it is the smallest planet and the closest to the Sun
Venus|second|rocky planet|no moons|it is the hottest planet because its thick air traps heat
Earth|third|rocky planet|one moon|it is the only planet known to have life
Mars|fourth|rocky planet|two moons|it is called the Red Planet because of its rusty dust
Jupiter|fifth|gas giant|many moons|it is the largest planet in the solar system
Saturn|sixth|gas giant|many moons|it is famous for its bright rings of ice
Uranus|seventh|ice giant|many moons|it is tilted so far that it rolls on its side
Neptune|eighth|ice giant|many moons|it has the fastest winds in the solar system
""")
ELEMENTS = _table("""
element|symbol|number|state|use
hydrogen|H|1|gas|it is used as a clean fuel
helium|He|2|gas|it is used to fill balloons
carbon|C|6|solid|it is found in every living thing
nitrogen|N|7|gas|it makes up most of the air
oxygen|O|8|gas|we need it to breathe
neon|Ne|10|gas|it is used in bright signs
sodium|Na|11|solid|together with chlorine it forms table salt
aluminium|Al|13|solid|it is used for cans and aircraft
silicon|Si|14|solid|it is used to make computer chips
chlorine|Cl|17|gas|it keeps swimming pools clean
calcium|Ca|20|solid|it makes bones and teeth strong
iron|Fe|26|solid|it is used to make steel
copper|Cu|29|solid|it is used in electric wires
zinc|Zn|30|solid|it protects steel from rust
silver|Ag|47|solid|it conducts electricity best of all metals
gold|Au|79|solid|it is used in jewellery and never rusts
mercury|Hg|80|liquid|it is the only metal that is liquid at room temperature
uranium|U|92|solid|it is used in nuclear power plants
""")
INVENTIONS = _table("""
thing|verb|person|year
the telephone|invented|Alexander Graham Bell|1876
the World Wide Web|invented|Tim Berners-Lee|1989
penicillin|discovered|Alexander Fleming|1928
the theory of general relativity|published|Albert Einstein|1915
Hamlet|wrote|William Shakespeare|about 1600
Don Quixote|wrote|Miguel de Cervantes|1605
Pride and Prejudice|wrote|Jane Austen|1813
the Mona Lisa|painted|Leonardo da Vinci|about 1503
The Starry Night|painted|Vincent van Gogh|1889
the Ninth Symphony|composed|Ludwig van Beethoven|1824
the first compiler|wrote|Grace Hopper|1952
the first computer program|wrote|Ada Lovelace|1843
the theory of evolution by natural selection|published|Charles Darwin|1859
""")

COUNTRY_TEXT = (
    "{country} is a country in {continent}. Its capital is {capital}, and people there speak {language}. "
    "The currency is the {currency}. {country} is known for {known_for}."
)
ANIMAL_TEXT = (
    "A {animal} is a {kind}. It lives in {habitat} and eats {food}. Its young is called a {young}. "
    "A remarkable fact: {fact}."
)
COUNTRY = lines(f"""
What is the capital of {{country}}?|Which city is the capital of {{country}}?|What's {{country}}'s capital? => The capital of {{country}} is {{capital}}.
What is the capital of {{country}}?|Name the capital of {{country}}.|Tell me the capital of {{country}}. => The capital of {{country}} is {{capital}}.
Which country has the capital {{capital}}?|{{capital}} is the capital of which country? => {{capital}} is the capital of {{country}}.
What language do people speak in {{country}}?|Which language is spoken in {{country}}?|What do people in {{country}} speak? => People in {{country}} speak {{language}}.
What currency does {{country}} use?|What is the currency of {{country}}? => {{country}} uses the {{currency}}.
Where is {{country}}?|On which continent is {{country}}?|Which continent is {{country}} in? => {{country}} is in {{continent}}.
What is {{country}} known for?|What is {{country}} famous for? => {{country}} is known for {{known_for}}.
Tell me about {{country}}.|What do you know about {{country}}?|Describe {{country}}. => {COUNTRY_TEXT}
Is {{capital}} the capital of {{country}}?|Is the capital of {{country}} {{capital}}? => Yes, {{capital}} is the capital of {{country}}.
Is {{other_capital}} the capital of {{country}}?|Is the capital of {{country}} {{other_capital}}? => No, the capital of {{country}} is {{capital}}.
Compare {{country}} and {{other_country}}.|How do {{country}} and {{other_country}} differ? => {{country}} is in {{continent}} and {{other_country}} is in {{other_continent}}. {{country}} is known for {{known_for}}, while {{other_country}} is known for {{other_known_for}}.
""")
ANIMAL = lines(f"""
What does a {{animal}} eat?|What do you feed a {{animal}}?|What is the food of a {{animal}}? => A {{animal}} eats {{food}}.
Where does a {{animal}} live?|Where can I find a {{animal}}? => A {{animal}} lives in {{habitat}}.
What is a young {{animal}} called?|What do you call a baby {{animal}}? => A young {{animal}} is called a {{young}}.
What kind of animal is a {{animal}}?|What type of animal is a {{animal}}? => A {{animal}} is a {{kind}}.
Is a {{animal}} a {{kind}}? => Yes, a {{animal}} is a {{kind}}.
Tell me a fact about the {{animal}}.|What is special about a {{animal}}? => Here is a fact about the {{animal}}: {{fact}}.
Tell me about the {{animal}}.|Describe a {{animal}}.|What is a {{animal}}?|Tell me about a {{animal}}. => {ANIMAL_TEXT}
""")
PLANET = lines("""
Tell me about {planet}.|What is {planet}?|Describe the planet {planet}. => {planet} is the {place} planet from the Sun. It is a {kind} with {moons}, and {fact}.
Which planet is {place} from the Sun? => {planet} is the {place} planet from the Sun.
What is special about {planet}?|Tell me a fact about {planet}. => Here is a fact about {planet}: {fact}.
How many moons does {planet} have?|Does {planet} have moons? => {planet} has {moons}.
Name the planets.|List the planets in order. => The eight planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.
""")
ELEMENT = lines("""
What is the chemical symbol of {element}?|What is the symbol for {element}? => The chemical symbol of {element} is {symbol}.
Which element has the symbol {symbol}? => {symbol} is the symbol of {element}.
What is the atomic number of {element}? => The atomic number of {element} is {number}.
What is {element} used for?|Why is {element} important?|What is {element}? => {element} is a chemical element with the symbol {symbol}. At room temperature it is a {state}, and {use}.
""")
INVENTION = lines("""
Who {verb} {thing}? => {person} {verb} {thing} in {year}.
""")
UNKNOWN = lines("""
What is the capital of {invented_name}?|Tell me about the country {invented_name}.|What language is spoken in {invented_name}? => I am sorry, I do not know a country called {invented_name}.
What does a {invented} eat?|Where does a {invented} live?|What is a {invented}? => I am sorry, I do not know what a {invented} is.
""")
COUNTRY_FOLLOW_UPS = lines("""
And what language do people speak there?|Which language do they speak? => People in {country} speak {language}.
What currency do they use?|And the currency? => {country} uses the {currency}.
On which continent is it?|Where is it? => {country} is in {continent}.
What is it known for?|What is it famous for? => {country} is known for {known_for}.
""")
ANIMAL_FOLLOW_UPS = lines("""
[And what|What] does it eat? => A {animal} eats {food}.
[And where|Where] does it live? => A {animal} lives in {habitat}.
What is its young called?|And its young? => A young {animal} is called a {young}.
""")
_TOPICS = [(COUNTRIES, COUNTRY), (ANIMALS, ANIMAL), (PLANETS, PLANET), (ELEMENTS, ELEMENT), (INVENTIONS, INVENTION)]


def _slots(rng: Random, table: list[Row]) -> Slots:
    """The fields of a row, and those of another one as `other_...`."""
    row, other = rng.sample(table, 2)
    return Slots(rng, row | {f"other_{name}": value for name, value in other.items()})


def examples_pair(rng: Random) -> Pair:
    """Ask for countries of a continent; the answer has neighbours in the table, so that each says which comes next."""
    continent = rng.choice(COUNTRIES)["continent"]
    names = [row["country"] for row in COUNTRIES if row["continent"] == continent]
    count, start = rng.randint(2, min(4, len(names))), rng.randrange(len(names))
    chosen = (names + names)[start : start + count]
    words = ("two", "three", "four")[count - 2]
    question = Slots(rng).fill(f"[Name {words} countries|Which are {words} countries] in {continent}[.|?]")
    return question, f"{upper_first(words)} countries in {continent} are {', '.join(chosen[:-1])} and {chosen[-1]}."


def knowledge_pair(rng: Random) -> Pair:
    """Return a question about any fact table and its answer."""
    roll = rng.random()
    if roll < 0.1:
        return draw_pair(rng, UNKNOWN)
    if roll < 0.15:
        return examples_pair(rng)
    table, block = rng.choices(_TOPICS, weights=(5, 3, 1, 1, 1))[0]
    return _slots(rng, table).pair(rng.choice(block))


def follow_up_chat(rng: Random) -> Document:
    """Questions about a country or an animal; the later ones say `it` or `there`."""
    table, first, later = COUNTRIES, COUNTRY, COUNTRY_FOLLOW_UPS
    if rng.random() < 0.4:
        table, first, later = ANIMALS, ANIMAL, ANIMAL_FOLLOW_UPS
    slots = _slots(rng, table)
    chosen = [rng.choice(first[:7]), *rng.sample(later, rng.randint(1, 3))]
    return chat(*(turn for line in chosen for turn in slots.pair(line)))


def encyclopedia_text(rng: Random) -> Document:
    """Descriptions from the fact tables as plain text."""
    table, text = rng.choice(((COUNTRIES, COUNTRY_TEXT), (ANIMALS, ANIMAL_TEXT)))
    return Document(text=" ".join(Slots(rng, row).fill(text) for row in rng.sample(table, rng.randint(1, 2))))
