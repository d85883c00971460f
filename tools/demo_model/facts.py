"""True facts the demo model learns: countries, animals, planets, elements and inventions.

Each table is a block of text with one row a line and ``|`` between the fields; it is parsed once at import.
"""

from typing import NamedTuple


class Country(NamedTuple):
    """A country and five facts about it."""

    name: str
    capital: str
    continent: str
    language: str
    currency: str
    known_for: str


class Animal(NamedTuple):
    """An animal: its class, where it lives, what it eats, its young and one remarkable fact."""

    name: str
    kind: str
    habitat: str
    food: str
    young: str
    fact: str


class Planet(NamedTuple):
    """A planet, its place counted from the Sun, its type and one remarkable fact."""

    name: str
    place: str
    kind: str
    moons: str
    fact: str


class Element(NamedTuple):
    """A chemical element with its symbol, atomic number, state at room temperature and a use."""

    name: str
    symbol: str
    number: str
    state: str
    use: str


class Invention(NamedTuple):
    """A work or discovery, the verb that fits it, its author and the year."""

    thing: str
    verb: str
    person: str
    year: str


_COUNTRIES = """
France|Paris|Europe|French|euro|the Eiffel Tower and fresh bread
Spain|Madrid|Europe|Spanish|euro|sunny beaches and flamenco
Portugal|Lisbon|Europe|Portuguese|euro|old trams and custard tarts
Italy|Rome|Europe|Italian|euro|pizza, pasta and the Colosseum
Germany|Berlin|Europe|German|euro|castles and fast cars
Austria|Vienna|Europe|German|euro|classical music and mountains
Greece|Athens|Europe|Greek|euro|ancient temples and blue seas
Finland|Helsinki|Europe|Finnish|euro|forests, lakes and saunas
Sweden|Stockholm|Europe|Swedish|krona|deep forests and clever design
Norway|Oslo|Europe|Norwegian|krone|fjords and northern lights
Denmark|Copenhagen|Europe|Danish|krone|bicycles and toy bricks
Iceland|Reykjavik|Europe|Icelandic|krona|volcanoes and hot springs
Ireland|Dublin|Europe|English|euro|green hills and folk music
Poland|Warsaw|Europe|Polish|zloty|old towns and dumplings
Hungary|Budapest|Europe|Hungarian|forint|thermal baths and goulash
Romania|Bucharest|Europe|Romanian|leu|castles and the Carpathian Mountains
Croatia|Zagreb|Europe|Croatian|euro|islands and clear water
Ukraine|Kyiv|Europe|Ukrainian|hryvnia|wide fields of wheat and sunflowers
Estonia|Tallinn|Europe|Estonian|euro|a medieval old town and digital services
Japan|Tokyo|Asia|Japanese|yen|cherry blossoms and fast trains
China|Beijing|Asia|Mandarin Chinese|yuan|the Great Wall and tea
South Korea|Seoul|Asia|Korean|won|technology and kimchi
Vietnam|Hanoi|Asia|Vietnamese|dong|noodle soup and green rice fields
Thailand|Bangkok|Asia|Thai|baht|golden temples and street food
Indonesia|Jakarta|Asia|Indonesian|rupiah|thousands of islands and volcanoes
Nepal|Kathmandu|Asia|Nepali|rupee|Mount Everest and mountain paths
Mongolia|Ulaanbaatar|Asia|Mongolian|tugrik|wide grasslands and horses
Turkey|Ankara|Asia|Turkish|lira|bazaars and strong coffee
Iran|Tehran|Asia|Persian|rial|poetry and fine carpets
Egypt|Cairo|Africa|Arabic|pound|the pyramids and the Nile
Morocco|Rabat|Africa|Arabic|dirham|colourful markets and the Sahara
Kenya|Nairobi|Africa|Swahili|shilling|lions and wide savannas
Ethiopia|Addis Ababa|Africa|Amharic|birr|coffee and high plateaus
Ghana|Accra|Africa|English|cedi|cocoa and bright cloth
Nigeria|Abuja|Africa|English|naira|music and film
Senegal|Dakar|Africa|French|franc|music and fishing boats
Tunisia|Tunis|Africa|Arabic|dinar|white houses and olive trees
Madagascar|Antananarivo|Africa|Malagasy|ariary|lemurs and vanilla
Canada|Ottawa|North America|English and French|dollar|maple syrup and great lakes
Mexico|Mexico City|North America|Spanish|peso|tacos and ancient pyramids
Cuba|Havana|North America|Spanish|peso|old cars and salsa music
Jamaica|Kingston|North America|English|dollar|reggae music and beaches
Costa Rica|San Jose|North America|Spanish|colon|rainforests and wildlife
Panama|Panama City|North America|Spanish|balboa|a famous canal
Brazil|Brasilia|South America|Portuguese|real|football and the Amazon rainforest
Argentina|Buenos Aires|South America|Spanish|peso|tango and wide plains
Chile|Santiago|South America|Spanish|peso|the Atacama Desert and the Andes
Peru|Lima|South America|Spanish|sol|Machu Picchu and llamas
Colombia|Bogota|South America|Spanish|peso|coffee and emeralds
Ecuador|Quito|South America|Spanish|dollar|the Galapagos Islands
Uruguay|Montevideo|South America|Spanish|peso|quiet beaches and cattle farms
Australia|Canberra|Oceania|English|dollar|kangaroos and coral reefs
New Zealand|Wellington|Oceania|English|dollar|green valleys and sheep
Fiji|Suva|Oceania|English|dollar|warm lagoons and coral
"""

_ANIMALS = """
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
cow|mammal|meadows and barns|grass|calf|its stomach has four parts
sheep|mammal|hills and meadows|grass|lamb|its wool is used to make warm clothes
camel|mammal|deserts|dry plants|calf|it stores fat in its hump
bat|mammal|caves and forests|insects and fruit|pup|it is the only mammal that can truly fly
dolphin|mammal|the sea|fish|calf|it finds its way with sound
blue whale|mammal|the sea|krill|calf|it is the largest animal that has ever lived
otter|mammal|rivers and coasts|fish and shellfish|pup|it often holds hands while it sleeps
hedgehog|mammal|gardens and hedges|insects and worms|hoglet|it rolls into a ball when it is afraid
squirrel|mammal|forests and parks|nuts and seeds|kit|it hides nuts for the winter
penguin|bird|cold southern coasts|fish|chick|it cannot fly but swims very well
owl|bird|forests|mice and insects|owlet|it can turn its head almost all the way around
eagle|bird|mountains|fish and small animals|eaglet|it has excellent eyesight
ostrich|bird|the savanna|plants and insects|chick|it is the fastest animal on two legs
parrot|bird|rainforests|fruit and seeds|chick|it can copy human speech
flamingo|bird|shallow lakes|algae and shrimp|chick|its pink colour comes from its food
duck|bird|ponds and rivers|plants and insects|duckling|its feathers are waterproof
hummingbird|bird|gardens and forests|nectar|chick|it can fly backwards
crocodile|reptile|rivers and swamps|fish and meat|hatchling|it has the strongest bite of all animals
turtle|reptile|the sea|jellyfish and sea grass|hatchling|it returns to the beach where it was born
chameleon|reptile|forests|insects|hatchling|it can change its colour
snake|reptile|many places|small animals|snakelet|it smells with its tongue
frog|amphibian|ponds and wet forests|insects|tadpole|it drinks through its skin
shark|fish|the sea|fish and seals|pup|it has existed longer than trees
salmon|fish|rivers and the sea|insects and small fish|fry|it swims back to the river where it was born
seahorse|fish|warm shallow seas|tiny shrimp|fry|the father carries the eggs
octopus|mollusc|the sea floor|crabs|larva|it has three hearts and eight arms
bee|insect|meadows and gardens|nectar and pollen|larva|it dances to show others where flowers are
butterfly|insect|gardens and meadows|nectar|caterpillar|it tastes with its feet
ant|insect|underground nests|seeds and insects|larva|it can carry many times its own weight
spider|arachnid|webs and corners|insects|spiderling|its silk is stronger than steel of the same weight
"""

_PLANETS = """
Mercury|first|rocky|no moons|it is the smallest planet and the closest to the Sun
Venus|second|rocky|no moons|it is the hottest planet because its thick air traps heat
Earth|third|rocky|one moon|it is the only planet known to have life
Mars|fourth|rocky|two moons|it is called the Red Planet because of its rusty dust
Jupiter|fifth|gas giant|many moons|it is the largest planet in the solar system
Saturn|sixth|gas giant|many moons|it is famous for its bright rings of ice
Uranus|seventh|ice giant|many moons|it is tilted so far that it rolls on its side
Neptune|eighth|ice giant|many moons|it has the fastest winds in the solar system
"""

_ELEMENTS = """
hydrogen|H|1|gas|it is used as a clean fuel
helium|He|2|gas|it is used to fill balloons
lithium|Li|3|solid|it is used in batteries
carbon|C|6|solid|it is found in every living thing
nitrogen|N|7|gas|it makes up most of the air
oxygen|O|8|gas|we need it to breathe
fluorine|F|9|gas|its compounds are used in toothpaste
neon|Ne|10|gas|it is used in bright signs
sodium|Na|11|solid|together with chlorine it forms table salt
magnesium|Mg|12|solid|it burns with a bright white light
aluminium|Al|13|solid|it is used for cans and aircraft
silicon|Si|14|solid|it is used to make computer chips
phosphorus|P|15|solid|it is used in matches and fertiliser
sulfur|S|16|solid|it is yellow and used in fertiliser
chlorine|Cl|17|gas|it keeps swimming pools clean
potassium|K|19|solid|it is found in bananas
calcium|Ca|20|solid|it makes bones and teeth strong
titanium|Ti|22|solid|it is strong, light and used in aircraft
iron|Fe|26|solid|it is used to make steel
nickel|Ni|28|solid|it is used in coins
copper|Cu|29|solid|it is used in electric wires
zinc|Zn|30|solid|it protects steel from rust
silver|Ag|47|solid|it conducts electricity best of all metals
tin|Sn|50|solid|it is used to join metal parts
iodine|I|53|solid|it is used to clean wounds
gold|Au|79|solid|it is used in jewellery and never rusts
mercury|Hg|80|liquid|it is the only metal that is liquid at room temperature
lead|Pb|82|solid|it is very heavy and was once used in pipes
uranium|U|92|solid|it is used in nuclear power plants
"""

_INVENTIONS = """
the telephone|invented|Alexander Graham Bell|1876
the World Wide Web|invented|Tim Berners-Lee|1989
penicillin|discovered|Alexander Fleming|1928
radium|discovered|Marie and Pierre Curie|1898
the theory of general relativity|published|Albert Einstein|1915
the law of gravity|published|Isaac Newton|1687
Hamlet|wrote|William Shakespeare|about 1600
Don Quixote|wrote|Miguel de Cervantes|1605
Pride and Prejudice|wrote|Jane Austen|1813
Frankenstein|wrote|Mary Shelley|1818
the Mona Lisa|painted|Leonardo da Vinci|about 1503
The Starry Night|painted|Vincent van Gogh|1889
Guernica|painted|Pablo Picasso|1937
the Ninth Symphony|composed|Ludwig van Beethoven|1824
The Four Seasons|composed|Antonio Vivaldi|about 1720
The Magic Flute|composed|Wolfgang Amadeus Mozart|1791
dynamite|invented|Alfred Nobel|1867
the first compiler|wrote|Grace Hopper|1952
the first computer program|wrote|Ada Lovelace|1843
the theory of evolution by natural selection|published|Charles Darwin|1859
"""


def _rows(block: str) -> list[list[str]]:
    return [line.split("|") for line in block.strip().splitlines()]


COUNTRIES = [Country(*row) for row in _rows(_COUNTRIES)]
ANIMALS = [Animal(*row) for row in _rows(_ANIMALS)]
PLANETS = [Planet(*row) for row in _rows(_PLANETS)]
ELEMENTS = [Element(*row) for row in _rows(_ELEMENTS)]
INVENTIONS = [Invention(*row) for row in _rows(_INVENTIONS)]
CONTINENTS = sorted({c.continent for c in COUNTRIES})
