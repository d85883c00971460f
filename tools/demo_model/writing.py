"""Texts to write or to work on: stories, poems, emails, summaries, questions about a passage, and exact copies."""

from random import Random

from .templates import Document, Slots, chat, lines, upper_first

_STORY = (
    "Once upon a time there was a [brave|kind|curious|clever|gentle] {hero} named {name} who lived in "
    "[a quiet forest|a small village|a house by the sea|a green valley|an old castle]. "
    "One [morning|evening|day], {name} wanted to {goal}. But {trouble}, and {name} did not know what to do. "
    'Then a {hero2} named {name2} came by and said, "Do not worry, {name}, I will help you." They worked together '
    "until the [sun|moon] came up, and at last they managed to {goal}. {name} thanked {name2}, and from that day on "
    "they were the best of friends. {name} learned that [good friends make every task lighter|patience is worth more "
    "than speed|it is always right to ask for help|a small step is better than none]."
)
_GOALS = lines("""
find the lost {color} {item} => the {color} {item} was gone
learn how to swim => the water was so deep
build a bridge => the river was too wide
bake the biggest cake => there was no flour left
reach the top of the hill => the path was steep
plant a new tree => the ground was hard and dry
bring {food} to a sick friend => the way was long and dark
""")
_POEMS = lines("""
the sea|The sea is wide, the sea is deep,|It sings the little fish to sleep.
the moon|The moon is up, the night is clear,|It tells the world that sleep is near.
the rain|The rain comes down on roof and tree,|It plays a song for you and me.
the spring|The spring is here, the fields are green,|The fairest days the year has seen.
the winter|The winter came with ice and snow,|And all the rivers ceased to flow.
the sun|The sun is warm, the sun is bright,|It fills the morning with its light.
a friend|A friend is there when days are long,|A friend will hear your silent song.
a cat|A cat sat still upon the wall,|And watched the autumn leaves that fall.
a tree|A tree stands tall in sun and rain,|It sheds its leaves and grows again.
a train|A train goes rolling down the track,|It leaves the town and then comes back.
""")
_EMAILS = lines("""
Write an email to {name} about {topic} on {day} at {time} in {room}.|Write a short email to {name}: we meet on {day} at {time} in {room} about {topic}.|Invite {name} to a meeting about {topic} on {day} at {time} in {room}. => Dear {name},{newline}I would like to invite you to a meeting about {topic} on {day} at {time} in {room}. Please let me know if this suits you.{newline}Best wishes
Write a thank-you note to {name} for the {product}.|Thank {name} for the {product} in an email. => Dear {name},{newline}Thank you very much for the {product}. It was so kind of you, and I use it every day.{newline}Best wishes
""")
_PASSAGES = {
    "{name} lives in {city} and works as a {job}. [In the evening {name} enjoys|The favourite hobby of {name} is] {hobby}. "
    "Every {day} {name} meets {name2}, and they eat {food} together. Last week {name2} gave {name} a {product}.": lines("""
Summarise this text: {text}|Summarize: {text}|{text}{newline}Sum this up in one sentence. => {name}, a {job} from {city}, enjoys {hobby} and meets {name2} every {day}.
Where does {name} live? => {name} lives in {city}.
What is the job of {name}? => {name} works as a {job}.
What is the hobby of {name}? => The hobby of {name} is {hobby}.
Whom does {name} meet every {day}? => {name} meets {name2} every {day}.
What do {name} and {name2} eat? => They eat {food}.
What did {name2} give {name}? => {name2} gave {name} a {product}.
"""),
    "On {day} {name} and {name2} left {city} by train. They arrived in {city2} in the evening and stayed for {people} days. "
    "{name2} took many pictures, and {name} bought a {item} at the market. They came home tired but happy.": lines("""
Summarise this text: {text}|Summarize: {text}|{text}{newline}Sum this up in one sentence. => {name} and {name2} went from {city} to {city2} by train and stayed for {people} days.
Where did they go?|Where did {name} go? => They went to {city2}.
How long did they stay? => They stayed for {people} days.
What did {name} buy? => {name} bought a {item}.
On which day did they leave? => They left on {day}.
Where did they start? => They started in {city}.
"""),
}
_COPIES = lines("""
Repeat after me: {text}|Say this: {text}|Repeat: {text} => {text}
Say this twice: {text} => {text}{newline}{text}
Put this in quotes: {text} => "{text}"
""")


def story(rng: Random) -> tuple[str, Slots]:
    """Return a short story and the values of its slots."""
    slots = Slots(rng)
    goal, trouble = rng.choice(_GOALS).split(" => ")
    slots |= {"goal": slots.fill(goal), "trouble": slots.fill(trouble)}
    return slots.fill(_STORY), slots


def story_chat(rng: Random) -> Document:
    """A user asks for a story; it is about the animal and the name given."""
    text, slots = story(rng)
    asked = (
        "[Tell me|Write] a [short story|story] about a {hero} [named|called] {name}.|Tell me a story about a {hero}."
    )
    return chat(slots.fill(f"[{asked}]"), text)


def story_text(rng: Random) -> Document:
    """A story as plain text."""
    return Document(text=story(rng)[0])


def poem_chat(rng: Random) -> Document:
    """A user asks for a poem."""
    topic, first, second = rng.choice(_POEMS).split("|")
    return chat(
        f"{rng.choice(('Write a poem', 'Write a short poem', 'I want a poem'))} about {topic}.", f"{first}\n{second}"
    )


def email_chat(rng: Random) -> Document:
    """A user asks for an email to somebody about something, and may give a name for its end."""
    slots = Slots(rng)
    question, email = slots.pair(rng.choice(_EMAILS))
    if rng.random() < 0.5:
        return chat(question, email)
    return chat(slots.fill(question + " My name is {name2}."), slots.fill(email + ",\n{name2}"))


def passage_chat(rng: Random) -> Document:
    """A passage followed by a request for a summary or by questions about it."""
    passage, (summary, *asks) = rng.choice(list(_PASSAGES.items()))
    slots = Slots(rng)
    slots["text"] = slots.fill(passage)
    if rng.random() < 0.35:
        return chat(*slots.pair(summary))
    first, *turns = (turn for line in rng.sample(asks, rng.randint(1, 3)) for turn in slots.pair(line))
    return chat(slots.fill("[{text}{newline}|Read this text: {text}{newline}Question: ]") + first, *turns)


def copy_chat(rng: Random) -> Document:
    """A user asks to repeat or to quote: exact copying."""
    slots = Slots(rng)
    words = [slots.fill(f"[{{invented{i}}}|{{item{i}}}|{{color{i}}}|{{city{i}}}]") for i in range(rng.randint(2, 7))]
    sentence = slots.fill("{name} has {count} {color} {item}{s} in {city}.")
    slots["text"] = rng.choice((" ".join(words), sentence))
    question, answer = rng.choice(_COPIES).split(" => ")
    return chat(slots.fill(f"[{question}]"), answer.format_map(slots))


def diary_text(rng: Random) -> Document:
    """A plain passage, as text to complete."""
    return Document(text=upper_first(Slots(rng).fill(rng.choice(list(_PASSAGES)))))
