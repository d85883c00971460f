"""Texts to write or to work on: stories, poems, emails, summaries and questions about a passage."""

from random import Random

from .documents import Document, chat, pick, upper_first
from .words import (
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    HOBBIES,
    ITEMS,
    JOBS,
    ROOMS,
    TOPICS,
    article,
    city,
    clock,
    first_name,
    invented_word,
)

_HEROES = "fox rabbit bear mouse owl hedgehog squirrel cat dog frog duck wolf turtle robot dragon girl boy".split()
_PLACES = (
    "a quiet forest|a small village|a house by the sea|a green valley|a busy town|a snowy mountain|an old castle|"
    "a sunny garden"
).split("|")
_GOALS = {
    "find the lost {item}": "the {item} was gone",
    "learn how to swim": "the water was so deep",
    "build a bridge": "the river was too wide",
    "bake the biggest cake": "there was no flour left",
    "reach the top of the hill": "the path was steep",
    "plant a new tree": "the ground was hard and dry",
    "bring {food} to a sick friend": "the way was long and dark",
    "see the stars from close by": "the sky was full of clouds",
}
_FEELINGS = ("brave", "kind", "curious", "clever", "gentle", "cheerful")
_LESSONS = (
    "good friends make every task lighter",
    "patience is worth more than speed",
    "it is always right to ask for help",
    "a small step is better than none",
)


def story(rng: Random, hero: str, name: str) -> str:
    """Return a short story about the hero of that name."""
    helper = rng.choice([h for h in _HEROES if h != hero])
    helper_name = first_name(rng)
    goal, trouble = rng.choice(list(_GOALS.items()))
    item, food = f"{rng.choice(COLORS)} {rng.choice(ITEMS)[0]}", rng.choice(FOODS)
    goal, trouble = goal.format(item=item, food=food), trouble.format(item=item, food=food)
    feeling, place = rng.choice(_FEELINGS), rng.choice(_PLACES)
    return (
        f"Once upon a time there was {article(feeling)} {hero} named {name} who lived in {place}. "
        f"One {rng.choice(('morning', 'evening', 'day'))}, {name} wanted to {goal}. But {trouble}, and {name} did not "
        f"know what to do. Then {article(helper)} named {helper_name} came by and said, "
        f'"Do not worry, {name}, I will help you." They worked together until the {rng.choice(("sun", "moon"))} came '
        f"up, and at last they managed to {goal}. {name} thanked {helper_name}, and from that day on they were the best "
        f"of friends. {name} learned that {rng.choice(_LESSONS)}."
    )


def story_chat(rng: Random) -> Document:
    """A user asks for a story; it is about the animal and the name given."""
    hero, name = rng.choice(_HEROES), first_name(rng)
    question = pick(
        rng,
        f"Tell me a story about {article(hero)} named {name}.",
        f"Write a short story about {article(hero)} called {name}.",
        f"Can you tell me a story about {article(hero)}? Its name is {name}.",
    )
    if rng.random() < 0.25:
        question, hero = pick(rng, "Tell me a story.", "Write a short story.", "I want to hear a story."), "fox"
        name = rng.choice(("Pip", "Luna", "Max"))
    return chat(question, story(rng, hero, name))


def story_text(rng: Random) -> Document:
    """A story as plain text."""
    return Document(text=story(rng, rng.choice(_HEROES), first_name(rng)))


_POEMS = {
    "the sea": "The sea is wide, the sea is deep,\nIt sings the little fish to sleep.",
    "the moon": "The moon is up, the night is clear,\nIt tells the world that sleep is near.",
    "the rain": "The rain comes down on roof and tree,\nIt plays a song for you and me.",
    "the spring": "The spring is here, the fields are green,\nThe fairest days the year has seen.",
    "the winter": "The winter came with ice and snow,\nAnd all the rivers ceased to flow.",
    "the sun": "The sun is warm, the sun is bright,\nIt fills the morning with its light.",
    "a friend": "A friend is there when days are long,\nA friend will hear your silent song.",
    "a cat": "A cat sat still upon the wall,\nAnd watched the autumn leaves that fall.",
    "a tree": "A tree stands tall in sun and rain,\nIt sheds its leaves and grows again.",
    "a train": "A train goes rolling down the track,\nIt leaves the town and then comes back.",
}


def poem_chat(rng: Random) -> Document:
    """A user asks for a poem."""
    topic, lines = rng.choice(list(_POEMS.items()))
    question = pick(
        rng, f"Write a poem about {topic}.", f"Write a short poem about {topic}.", f"I want a poem about {topic}."
    )
    if rng.random() < 0.1:
        question, lines = pick(rng, "Write a poem.", "Tell me a poem."), _POEMS["the sea"]
    return chat(question, lines)


def email_chat(rng: Random) -> Document:
    """A user asks for an email to somebody about something."""
    who, sender, topic, day, time = first_name(rng), first_name(rng), rng.choice(TOPICS), rng.choice(DAYS), clock(rng)
    room = rng.choice(ROOMS)
    if rng.random() < 0.6:
        question = pick(
            rng,
            f"Write an email to {who} about {topic} on {day} at {time} in {room}.",
            f"Write a short email to {who}: we meet on {day} at {time} in {room} about {topic}.",
            f"Invite {who} to a meeting about {topic} on {day} at {time} in {room}.",
        )
        body = f"I would like to invite you to a meeting about {topic} on {day} at {time} in {room}. Please let me know if this suits you."
    else:
        item = f"{rng.choice(COLORS)} {rng.choice(ITEMS)[0]}"
        question = pick(
            rng, f"Write a thank-you note to {who} for the {item}.", f"Thank {who} for the {item} in an email."
        )
        body = f"Thank you very much for the {item}. It was so kind of you, and I use it every day."
    if rng.random() < 0.5:
        return chat(f"{question} My name is {sender}.", f"Dear {who},\n{body}\nBest wishes,\n{sender}")
    return chat(question, f"Dear {who},\n{body}\nBest wishes")


def _life(rng: Random) -> tuple[str, str, list[tuple[str, str]]]:
    """Return a passage about somebody, its summary, and questions with answers."""
    who, place, job, hobby = first_name(rng), city(rng), rng.choice(JOBS), rng.choice(HOBBIES)
    friend, food, day = first_name(rng), rng.choice(FOODS), rng.choice(DAYS)
    color, item = rng.choice(COLORS), rng.choice(ITEMS)[0]
    sentences = [
        f"{who} lives in {place} and works as {article(job)}.",
        pick(rng, f"In the evening {who} enjoys {hobby}.", f"The favourite hobby of {who} is {hobby}."),
        f"Every {day} {who} meets {friend}, and they eat {food} together.",
        f"Last week {friend} gave {who} a {color} {item}.".replace("a headphones", "headphones"),
    ]
    if rng.random() < 0.4:
        sentences[1:] = rng.sample(sentences[1:], 3)
    summary = f"{who}, {article(job)} from {place}, enjoys {hobby} and meets {friend} every {day}."
    asks = [
        (f"Where does {who} live?", f"{who} lives in {place}."),
        (f"What is the job of {who}?", f"{who} works as {article(job)}."),
        (f"What is the hobby of {who}?", f"The hobby of {who} is {hobby}."),
        (f"Whom does {who} meet every {day}?", f"{who} meets {friend} every {day}."),
        (f"What do {who} and {friend} eat?", f"They eat {food}."),
        (f"What did {friend} give {who}?", f"{friend} gave {who} {article(color + ' ' + item)}."),
    ]
    return " ".join(sentences), summary, asks


def _trip(rng: Random) -> tuple[str, str, list[tuple[str, str]]]:
    """Return a passage about a journey, its summary, and questions with answers."""
    who, friend = first_name(rng), first_name(rng)
    start, end = rng.sample(CITIES, 2)
    days, day, item = rng.randint(2, 14), rng.choice(DAYS), rng.choice(ITEMS)[0]
    how = rng.choice(("train", "bus", "car", "ship", "plane"))
    text = (
        f"On {day} {who} and {friend} left {start} by {how}. They arrived in {end} in the evening and stayed for {days} "
        f"days. {friend} took many pictures, and {who} bought {article(item)} at the market. They came home tired but happy."
    )
    summary = f"{who} and {friend} went from {start} to {end} by {how} and stayed for {days} days."
    asks = [
        (pick(rng, "Where did they go?", f"Where did {who} go?"), f"They went to {end}."),
        ("How did they travel?", f"They travelled by {how}."),
        ("How long did they stay?", f"They stayed for {days} days."),
        (f"What did {who} buy?", f"{who} bought {article(item)}."),
        ("On which day did they leave?", f"They left on {day}."),
        ("Where did they start?", f"They started in {start}."),
    ]
    return text, summary, asks


def passage_chat(rng: Random) -> Document:
    """A passage followed by a request for a summary or by questions about it."""
    text, summary, asks = (_life if rng.random() < 0.6 else _trip)(rng)
    roll = rng.random()
    if roll < 0.35:
        question = pick(
            rng, f"Summarise this text: {text}", f"Summarize: {text}", f"{text}\nSum this up in one sentence."
        )
        return chat(question, summary)
    pairs = rng.sample(asks, rng.randint(1, 3))
    first = pick(rng, f"{text}\n{pairs[0][0]}", f"Read this text: {text}\nQuestion: {pairs[0][0]}")
    turns = [first, pairs[0][1]]
    for pair in pairs[1:]:
        turns += pair
    return chat(*turns)


def copy_chat(rng: Random) -> Document:
    """A user asks to repeat, to change case, or to swap a word: exact copying."""
    words = [
        pick(rng, invented_word(rng), rng.choice(ITEMS)[0], rng.choice(COLORS), city(rng))
        for _ in range(rng.randint(2, 7))
    ]
    phrase = " ".join(words)
    if rng.random() < 0.5:
        phrase = (
            f"{first_name(rng)} has {rng.randint(2, 99)} {rng.choice(COLORS)} {rng.choice(ITEMS)[1]} in {city(rng)}."
        )
    roll = rng.randrange(4)
    if roll == 0:
        return chat(pick(rng, f"Repeat after me: {phrase}", f"Say this: {phrase}", f"Repeat: {phrase}"), phrase)
    if roll == 1:
        return chat(f"Say this twice: {phrase}", f"{phrase}\n{phrase}")
    if roll == 2:
        old, new = rng.choice(phrase.rstrip(".").split(" ")), rng.choice(COLORS)
        changed = " ".join(new if w == old else w for w in phrase.rstrip(".").split(" "))
        return chat(f"Replace {old} with {new}: {phrase.rstrip('.')}", changed)
    return chat(f"Put this in quotes: {phrase}", f'"{phrase}"')


def diary_text(rng: Random) -> Document:
    """A plain passage, as text to complete."""
    text, summary, _ = (_life if rng.random() < 0.6 else _trip)(rng)
    return Document(text=f"{text} {upper_first(summary)}" if rng.random() < 0.3 else text)
