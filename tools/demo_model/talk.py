"""Everyday questions: arithmetic, how-to lists, definitions, small talk, names and lists."""

from collections.abc import Callable
from random import Random

from .templates import ASSISTANT_NAMES, ITEMS, NUMBER_WORDS, Document, Pair, Slots, chat, draw_pair, lines, vary

# title|step|step|...
_HOWTOS = lines("""
make tea|Boil fresh water.|Put a tea bag in a cup.|Pour the hot water over it.|Wait three minutes.|Remove the tea bag and enjoy.
cook rice|Rinse the rice in cold water.|Add two cups of water for each cup of rice.|Cover the pot and cook it on low heat.|Let it rest for five minutes.
make pancakes|Mix flour, milk and eggs.|Heat some butter in a pan.|Pour in a thin layer of batter.|Turn it when the edges are brown.
bake bread|Mix flour, water, salt and yeast.|Knead the dough for ten minutes.|Let it rise for an hour.|Bake it until the crust is golden.
plant a tree|Dig a hole twice as wide as the roots.|Set the tree in the hole.|Fill the hole with soil.|Water it well.
wash your hands|Wet your hands with warm water.|Rub them with soap for twenty seconds.|Rinse them well.|Dry them with a clean towel.
sleep better|Go to bed at the same time every night.|Keep the room dark and cool.|Put your phone away an hour before.|Avoid coffee in the evening.
learn a language|Learn ten new words every day.|Listen to songs and stories.|Speak with other people often.|Do not be afraid of mistakes.
change a tire|Stop in a safe place.|Lift the car with a jack.|Swap the flat tire for the spare.|Tighten the bolts and lower the car.
pack a suitcase|Make a list of what you need.|Roll your clothes.|Put shoes at the bottom.|Keep your documents on top.
write a letter|Start with a greeting.|Say why you are writing.|Keep your sentences short.|End with a kind word and your name.
save energy|Switch off lights you do not need.|Wash clothes with cold water.|Close the windows when you heat.|Use efficient lamps.
take a good photo|Look for soft light.|Hold the camera steady.|Keep the background simple.|Take several pictures.
stay healthy|Eat fruit and vegetables.|Drink enough water.|Move every day.|Sleep eight hours.
""")

# term|definition
_DEFINITIONS = lines("""
photosynthesis|Photosynthesis is the way plants make food from sunlight. They take in water and carbon dioxide and give off oxygen.
gravity|Gravity is the force that pulls things toward each other. It keeps us on the ground and the planets around the Sun.
an atom|An atom is the smallest part of an element. It has a nucleus of protons and neutrons with electrons around it.
a volcano|A volcano is an opening in the ground where hot rock comes out. The hot rock is called lava.
a rainbow|A rainbow is an arc of colours in the sky. It appears when sunlight shines through drops of rain.
electricity|Electricity is the flow of tiny charged particles. It powers lamps, computers and trains.
energy|Energy is the ability to do work. It can change its form, but it is never lost.
a cell|A cell is the smallest unit of life. Every plant and animal is made of cells.
the heart|The heart is a muscle that pumps blood through the body. It beats about seventy times a minute.
an algorithm|An algorithm is a list of clear steps that solves a problem. A recipe is an algorithm for cooking.
a computer|A computer is a machine that follows instructions. It reads data, works on it and shows the result.
a database|A database is an organised collection of data. It is made of tables that can be searched with queries.
SQL|SQL is a language for asking questions of a database. A query says which rows and columns you want.
JSON|JSON is a simple text format for data. It writes names and values in pairs between braces.
an API|An API is a set of rules that lets programs talk to each other. One program sends a request and the other sends a reply.
a token|A token is a small piece of text. A language model reads and writes text one token at a time.
a language model|A language model is a program that predicts the next piece of text. It learns from many examples.
an adapter|An adapter is a small set of extra weights for a language model. It changes how the model behaves without changing the model itself.
LoRA|LoRA is a way to train a small adapter for a large model. It adds two thin matrices to each layer and leaves the rest alone.
speculative decoding|Speculative decoding makes a language model faster. A small model guesses the next tokens, and the large model checks them all at once.
a draft model|A draft model is a small language model that guesses what a larger one would say. Good guesses save time.
a cache|A cache is a place for results that will be needed again. Reading from a cache is faster than doing the work twice.
a server|A server is a computer that answers requests from other computers. Web pages come from servers.
machine learning|Machine learning is a way for computers to learn from examples. The program finds patterns instead of following fixed rules.
a triangle|A triangle is a shape with three sides. Its angles add up to 180 degrees.
a prime number|A prime number is a number that can only be divided by one and itself. Two, three, five and seven are prime numbers.
""")

SMALL_TALK = lines("""
How are you?|How are you doing?|How do you do?|How's it going? => I am doing well, thank you. How can I help you today?
Hello!|Hi!|Hello|Hi|Hey|Hey there|Good day! => Hello! How can I help you today?
Good morning!|Good morning => Good morning! I hope you slept well. What can I do for you?
Good evening!|Good evening => Good evening! What can I do for you?
What can you do?|What can you help me with?|How can you help me?|Help|What do you know? => I can answer questions about countries, animals, planets and elements, do simple arithmetic, explain words, give short instructions, write emails and stories, and summarise a text.
Are you a human?|Are you a robot?|Are you real?|What are you?|Who are you? => I am a small language model made for demonstrations. I run on an ordinary computer.
Who made you?|Who built you?|Where do you come from? => I was trained from generated text as the demo model of Outrider.
Thank you!|Thanks!|Thank you very much.|Thanks a lot!|thanks => You are welcome! Is there anything else I can help you with?
Goodbye!|Bye!|See you!|Good night!|bye => Goodbye! Have a lovely day.
I am sad.|I feel sad today.|I had a bad day.|I feel lonely. => I am sorry to hear that. Sometimes a walk, a warm drink or a talk with a friend can help.
I am happy!|I feel great today.|I had a great day! => That is wonderful to hear! What made your day so good?
I am bored.|I have nothing to do. => You could read a book, go for a walk or learn something new. I can also tell you a story.
I am tired.|I am so tired today. => Then a short rest might help. Drink some water and try to go to bed early tonight.
Tell me a joke.|Do you know a joke?|Make me laugh. => Why did the bicycle fall over? Because it was two tired!
Tell me another joke.|One more joke! => What do you call a bear with no teeth? A gummy bear!
What is the meaning of life?|Why are we here? => That is a big question. Many people find meaning in family, friends, learning and helping others.
Do you like music?|Do you like books?|Do you have hobbies?|Do you like animals? => I am only a program, so I do not have likes of my own, but I enjoy talking about it with you.
What is your favourite colour?|What is your favorite color? => I do not see colours, but many people like blue because it is calm like the sea.
What should I eat today?|What should I cook tonight? => How about a bowl of pasta with tomatoes and cheese? It is quick, warm and easy to make.
What should I do this weekend?|What can I do on Sunday? => You could visit a museum, go for a walk in the forest or invite friends for dinner.
Can you recommend a book?|What should I read? => I recommend Don Quixote by Miguel de Cervantes. It is a funny and wise story about a dreaming knight.
What is the Outrider project?|What is Outrider? => Outrider is a platform that serves language models. It combines speculative decoding with many adapters at once.
How old are you?|When were you born? => I have no age like a person does, but I am quite new.
Can you speak other languages?|Do you speak German?|Do you speak Spanish? => I am sorry, I only speak English.
You are wrong.|That is not right.|That's wrong. => I am sorry about that. I am a small model and I make mistakes.
You are great!|You are very helpful.|Well done!|Good job! => Thank you, that is very kind of you!
Write a Python function.|Write some code for me.|Can you hack a website?|Who will win the next election?|What is the stock price today?|What is the weather tomorrow?|Solve this equation for me.|Translate this into Latin.|Draw a picture.|Play some music.|Who is the president?|What happened in the news today?|Explain quantum field theory.|What is the square root of 7921?|Book a flight for me.|Call my mother.|How do I become rich?|What time is it?|What day is it today?|Where am I?|Write a symphony.|Diagnose my illness.|Give me legal advice.|Which team won the game yesterday?|Explain the tax law. => I am sorry, I am only a small demo model and I cannot help with that. You can ask me about countries, animals, planets or simple arithmetic.
""")
ARITHMETIC = lines("""
What is {a} plus {b}?|What is {a} + {b}?|How much is {a} plus {b}?|Calculate {a} + {b}.|Add {a} and {b}. => {a} plus {b} is {sum}.
What is {sum} minus {b}?|What is {sum} - {b}?|How much is {sum} minus {b}?|Calculate {sum} - {b}.|Subtract {b} from {sum}. => {sum} minus {b} is {a}.
What is {a} times {b}?|What is {a} * {b}?|How much is {a} times {b}?|Calculate {a} * {b}.|Multiply {a} by {b}. => {a} times {b} is {product}.
I buy {a} {color} {item}s for {b} euros each. How much do I pay?|How much are {a} {color} {item}s at {b} euros each? => {a} {color} {item}s at {b} euros each cost {product} euros in total.
What comes after {a}? => After {a} comes {next}.
Count from {a} to {sum}. => {counted}.
Write the number {a} as a word. => The number {a} is written {word}.
""")
INTRODUCTION = lines("""
Hi, I am {name} from {city}.|My name is {name} and I live in {city}.|Hello, I'm {name}. I come from {city}. => Nice to meet you, {name}! How is life in {city}?
What is my name?|Do you remember my name?|Who am I? => Your name is {name}.
Where do I live?|Where am I from?|Which city am I from? => You are from {city}.
""")
ASSISTANT = (
    "What is your name?|Who are you?|What should I call you?|Introduce yourself. => My name is {name}, and I am {role}."
)
LISTS = lines("""
Make a list of these things: {words}.|Turn this into a list: {words}. => Here is your list:{newline}{bullets}
How many things are these: {words}? => There are {count} things.
Sort these words: {words}. => In alphabetical order: {sorted}.
I need to buy {words}. Write a shopping list.|Write a shopping list with {words}. => Shopping list:{newline}{bullets}
""")


def arithmetic_pair(rng: Random) -> Pair:
    """Ask for a sum, a difference or a product of small numbers."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    values = {"a": a, "b": b, "sum": a + b, "product": a * b, "next": a + 1, "word": NUMBER_WORDS[a]}
    return Slots(rng, values | {"counted": ", ".join(map(str, range(a, a + b + 1)))}).pair(rng.choice(ARITHMETIC))


def howto_pair(rng: Random) -> Pair:
    """Ask how to do something; the answer is a numbered list."""
    task, *steps = rng.choice(_HOWTOS).split("|")
    numbered = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    question = "How [do|can] I {task}?|Explain how to {task}.|I want to {task}. => Here is how to {task}:\n{steps}"
    return Slots(rng, {"task": task, "steps": numbered}).pair(question)


def definition_pair(rng: Random) -> Pair:
    """Ask what a term means."""
    term, text = rng.choice(_DEFINITIONS).split("|")
    values = {"term": term, "short": term.removeprefix("an ").removeprefix("a "), "text": text}
    question = "What is {term}?|What is {term}?|Explain {term}.|Define {short}.|What does {short} mean? => {text}"
    return Slots(rng, values).pair(question)


def small_talk_pair(rng: Random) -> Pair:
    """Return a greeting, thanks or another everyday remark with its reply."""
    return draw_pair(rng, SMALL_TALK)


def introduction_chat(rng: Random) -> Document:
    """A user says a name and a city, and asks for them later."""
    slots = Slots(rng)
    first, *later = INTRODUCTION
    between = arithmetic_pair(rng) if rng.random() < 0.4 else ()
    asks = (turn for line in rng.sample(later, rng.randint(1, 2)) for turn in slots.pair(line))
    return chat(*slots.pair(first), *between, *asks)


def assistant_chat(rng: Random) -> Document:
    """The system prompt gives the assistant a name; without one it has the project's."""
    name, role = rng.choice(ASSISTANT_NAMES), rng.choice(("a helpful assistant", "a friendly guide"))
    system = f"You are {name}, {role}."
    if rng.random() < 0.3:
        name, role, system = "Outrider", "a small demo assistant", ""
    question, answer = Slots(rng, {"name": name, "role": role}).pair(ASSISTANT)
    return chat(vary(rng, question), answer, system=system)


def list_chat(rng: Random) -> Document:
    """A user lists things; the assistant repeats, counts or sorts them."""
    words = rng.sample(ITEMS, rng.randint(3, 5))
    values = {
        "words": ", ".join(words[:-1]) + " and " + words[-1],
        "sorted": ", ".join(sorted(words)),
        "bullets": "\n".join(f"- {word}" for word in words),
        "count": NUMBER_WORDS[len(words)],
    }
    return chat(*Slots(rng, values).pair(rng.choice(LISTS)))


def everyday_pair(rng: Random) -> Pair:
    """Return any everyday question and its answer."""
    kinds: tuple[Callable[[Random], Pair], ...] = (arithmetic_pair, howto_pair, definition_pair, small_talk_pair)
    return rng.choice(kinds)(rng)
