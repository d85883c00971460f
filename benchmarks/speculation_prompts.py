"""Prompts for drafters of a chat model: to train them on the model's answers, and to measure them on others.

    python benchmarks/speculation_prompts.py OUT_DIR [--chats 5000] [--adapter-chats 1500] [--model MODEL --own 6000]

    OUT_DIR/chat.jsonl           questions, tasks and texts to rewrite: templates filled with topics
    OUT_DIR/own.jsonl            with --model: what the model itself writes as a user (Magpie, arXiv:2406.08464), of
                                 more topics than lists have, without those held out
    OUT_DIR/{json,sql,support}.jsonl   requests to the adapters of speculation_adapters.py
    OUT_DIR/held-out-*.jsonl     prompts to measure on. Neither the topics nor the templates of `held-out-chat.jsonl`
                                 are in chat.jsonl; `held-out-rewriting.jsonl` has other texts and edits than chat.jsonl

A line is {"messages": [...]}. Everything but own.jsonl depends on the seed alone.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from checkout import use_checkout

use_checkout()

from outrider.tools.demo_model.mixture import ADAPTERS  # noqa: E402
from outrider.tools.demo_model.templates import Slots  # noqa: E402

TASKS = ("json", "sql", "support")
HELD_OUT = 32
"""Prompts of each kind to measure on."""
OWN_TOKENS, SHORTEST = 48, 12
"""Longest prompt that a model writes itself, in tokens, and shortest, in characters."""

# Kind of topic: topics. Every eighth topic of a kind is held out.
_TOPICS = {
    "subject": "photosynthesis|black holes|the water cycle|volcanoes|earthquakes|inflation|democracy|"
    "the stock market|machine learning|neural networks|the internet|encryption|vaccines|the immune system|DNA|"
    "evolution|gravity|magnetism|electricity|nuclear energy|solar panels|wind turbines|climate change|"
    "the ozone layer|coral reefs|rainforests|deserts|glaciers|the French Revolution|the Roman Empire|"
    "the Industrial Revolution|the Renaissance|the Silk Road|ancient Egypt|the printing press|the Cold War|"
    "the moon landing|jazz music|impressionist painting|Greek mythology|haiku poetry|opera|film editing|photography|"
    "architecture|chess|football|marathon running|swimming|yoga|meditation|sleep|memory|stress|nutrition|vitamins|"
    "fermentation|coffee|tea|chocolate|bread|olive oil|bees|ants|whales|octopuses|bats|wolves|penguins|"
    "migratory birds|dinosaurs|mushrooms|bamboo|trees|soil|rivers|tides|hurricanes|lightning|rainbows|comets|Mars|"
    "Jupiter|the Sun|satellites|telescopes|robots|drones|electric cars|bicycles|railways|bridges|skyscrapers|maps|"
    "languages|writing systems|probability|prime numbers|geometry|algorithms|databases|operating systems|"
    "open source|insurance|taxes|credit scores|supply chains|recycling|composting|urban gardens|public libraries|"
    "museums",
    "skill": "learn a new language|bake sourdough bread|cook rice|grow tomatoes|train a puppy|write a cover letter|"
    "prepare for a job interview|give a good presentation|save money|plan a budget|start a small business|"
    "fix a flat tire|clean a bicycle|paint a room|build a bookshelf|take better photos|play the guitar|"
    "read more books|sleep better|run a first marathon|lose weight safely|stretch before exercise|make new friends|"
    "resolve a conflict|manage my time|stop procrastinating|study for an exam|take notes|write a short story|"
    "write a poem|learn to program|debug a program|set up a website|choose a laptop|back up my files|"
    "create a strong password|avoid phishing emails|plan a road trip|pack a suitcase|travel on a small budget|"
    "organize a party|decorate a cake|brew good coffee|make pasta|keep houseplants alive|remove a stain|"
    "declutter a house|reduce plastic waste|save water|start composting|teach a child to read|talk to a shy person|"
    "apologize to a friend|ask for a raise|negotiate a price|prepare for a storm|treat a small burn|"
    "stay calm under pressure|memorize a speech|improve my handwriting|learn to swim|start meditating",
    "place": "Paris|Tokyo|Rome|New York|Cairo|Sydney|Rio de Janeiro|London|Istanbul|Berlin|Barcelona|Amsterdam|"
    "Kyoto|Marrakesh|Cape Town|Reykjavik|Vancouver|Mexico City|Buenos Aires|Lisbon|Prague|Vienna|Athens|Dublin|"
    "Edinburgh|Singapore|Bangkok|Mumbai|Nairobi|Lima|Havana|Venice|Seoul|Hanoi|Zurich|Stockholm|Oslo|Helsinki|"
    "Budapest|Krakow",
    "hero": "a lonely lighthouse keeper|a dragon who is afraid of fire|a young inventor|two brothers at sea|"
    "a robot that learns to paint|a clever fox|an old librarian|a lost astronaut|a baker with a secret|"
    "a talking tree|a girl who finds a map|a detective in a small town|a musician without a voice|"
    "a knight who hates fighting|a mouse in a castle|a time traveler|a ghost who loves books|"
    "a farmer and his donkey|a queen in disguise|a boy who can speak to birds|a sailor and a whale|a clockmaker|"
    "a cat that runs a cafe|a teacher on Mars",
    "pair": "cats and dogs|coffee and tea|trains and planes|books and films|cities and villages|summer and winter|"
    "Python and Java|electric cars and petrol cars|mountains and beaches|paper books and e-books|"
    "renting and buying a house|working at home and in an office|football and basketball|oil paint and watercolors|"
    "guitar and piano|weather and climate|bacteria and viruses|stocks and bonds|frogs and toads|lakes and rivers|"
    "butter and olive oil|wood and steel|laptops and tablets|alligators and crocodiles",
    "job": "a nurse|a software engineer|a teacher|a firefighter|a chef|a pilot|a lawyer|an architect|a farmer|"
    "a plumber|an electrician|a journalist|a librarian|a scientist|a mechanic|a translator|a carpenter|"
    "a photographer|a gardener|a bus driver|a dentist|a police officer|a designer|an accountant",
}
# Templates, by the kind of topic that they take. The last quarter of each kind is held out.
_TEMPLATES = {
    "subject": "What is {}?|Explain {} to a beginner.|Tell me about {}.|Why is {} important?|How does {} work?|"
    "Give me three interesting facts about {}.|Write a short paragraph about {}.|Summarize {} in two sentences.|"
    "What should I know about {}?|Write a quiz question about {} and answer it.|List five key terms about {}.|"
    "Describe {} as if I were ten years old.|What are common myths about {}?|Who has studied {}, and why?|"
    "Write the introduction of an essay about {}.|What is the history of {}?|"
    "I am curious about {}. Where do I start?|Can you explain {} with a simple example?|"
    "What would the world be like without {}?|Please describe {} briefly.",
    "skill": "How do I {}?|Give me tips to {}.|What is the best way to {}?|I want to {}. Where should I start?|"
    "List the steps to {}.|Which mistakes should I avoid if I want to {}?|Make a plan for one week to {}.|"
    "Why is it hard to {}?|What do I need to {}?|How long does it take to {}?|Help me to {}, please.|"
    "My friend wants to {}. What should I tell her?",
    "place": "What can I do in {} in one day?|Tell me about {}.|What food is {} known for?|Plan a weekend in {}.|"
    "When is the best time to visit {}?|Write a postcard from {}.|Describe {} in a few sentences.|"
    "I am moving to {}. What should I know?",
    "hero": "Write a short story about {}.|Tell me a story about {}.|Write a poem about {}.|"
    "Write the first paragraph of a novel about {}.|Invent a title and a plot for a film about {}.|"
    "Write a dialogue with {}.|Begin a fairy tale about {}.|Describe a day in the life of {}.",
    "pair": "What is the difference between {}?|Compare {}.|Which do you prefer, {}, and why?|"
    "Make a list of pros and cons of {}.|How are {} similar?|Help me decide between {}.",
    "job": "What does {} do?|How can I become {}?|Write a short biography of {}.|Describe the typical day of {}.|"
    "Write an email to {} to ask for advice.|Which skills does {} need?|Is it hard to be {}?|"
    "Interview {}: write three questions and answers.",
}
_SENTENCES = (
    "{name} moved to {city} in {year} and opened a small shop that sells {item}s and other things for the house.",
    "Every {day} at {time} the neighbours meet in {room} to talk about {topic}, and {name} brings {food} for everyone.",
    "Last {month} the prices rose by {count} percent, so many families now buy fewer {item}s than before.",
    "The {color} {item} in the window costs {price} euros, but {name2} would never sell it to a stranger.",
    "On {date} a storm closed the road to {city2}, and the mail arrived {count} days late.",
    "{name2} works as a {job}, likes {hobby}, and has lived in the same street for {people} years.",
    "Nobody knows who left the {product} at the station, although the police asked more than {people} people.",
    "The museum of {city} has shown paintings of {color2} {item2}s since {year2}, and children get in for free.",
)
_EDITS = (
    "Repeat the following text, but write {new} instead of {old}.",
    "Copy this text and replace {old} with {new}.",
    "Rewrite the text below. Change {old} to {new} and keep everything else.",
    "Here is a text. Correct it: {old} should be {new}. Return the whole text.",
)
_HELD_OUT_EDIT = "Text: {text}\n\nRepeat the text above, with '{new}' in the place of '{old}'."


def is_held_out(number: int, count: int, topic: bool) -> bool:
    """True for every eighth topic, and for the last quarter of a kind's templates."""
    return number % 8 == 5 if topic else number >= count - max(1, count // 4)


def chats(held_out: bool) -> list[str]:
    """Every template with every topic of its kind, either of those held out or of the others."""
    found = []
    for kind, templates in _TEMPLATES.items():
        parts = templates.split("|"), _TOPICS[kind].split("|")
        kept = [
            [one for number, one in enumerate(all_) if is_held_out(number, len(all_), all_ is parts[1]) == held_out]
            for all_ in parts
        ]
        found += [template.format(topic) for template in kept[0] for topic in kept[1]]
    return found


def rewriting(rng: Random, held_out: bool) -> str:
    """A text to repeat with one word changed."""
    slots = Slots(rng)
    kept = _SENTENCES[-2:] + _SENTENCES[:2] if held_out else _SENTENCES[:-2]
    text = " ".join(slots.fill(sentence) for sentence in rng.sample(kept, 4 if held_out else 3))
    old = rng.choice([word for word in re.findall(r"[a-z]{4,}", text) if text.count(word) == 1])
    new = rng.choice([word for word in ("green", "garden", "seven", "letter", "quiet", "winter") if word not in text])
    if held_out:
        return _HELD_OUT_EDIT.format(text=text, old=old, new=new)
    return f"{rng.choice(_EDITS).format(old=old, new=new)}\n\n{text}"


def task_chats(rng: Random, task: str) -> Iterator[str]:
    """Requests to an adapter, none of them twice."""
    seen = set()
    while True:
        messages = ADAPTERS[task](rng).messages
        if messages[-2][1] not in seen and len(messages) == 2:
            seen.add(messages[-2][1])
            yield messages[-2][1]


def own_chats(model: str, count: int) -> list[str]:
    """Texts of a chat model after the first tokens of a user's turn, at temperature 0.8: about four fifths of `count`,
    since long turns, repetitions and those that name a topic held out are dropped."""
    from outrider import LLM, SamplingParams

    params = SamplingParams(temperature=0.8, max_tokens=OWN_TOKENS)
    with LLM(model, max_num_seqs=128, max_model_len=256) as llm:
        tokenizer = llm.get_tokenizer()
        whole = tokenizer.apply_chat_template([{"role": "user", "content": "\1"}], tokenize=False)
        ids = tokenizer.encode(whole.partition("\1")[0], add_special_tokens=False)
        found = [output.outputs[0] for output in llm.generate([{"prompt_token_ids": ids}] * count, params)]
    named = [
        re.escape(re.sub("^(a|an|the) ", "", topic))
        for topics in _TOPICS.values()
        for number, topic in enumerate(topics.split("|"))
        if is_held_out(number, 0, topic=True)
    ]
    held_out = re.compile(rf"\b({'|'.join(named)})\b", re.IGNORECASE)
    texts = dict.fromkeys(one.text.strip() for one in found if one.finish_reason == "stop")
    return [text for text in texts if len(text) >= SHORTEST and "<|" not in text and not held_out.search(text)]


def write_prompts(file: Path, prompts: list[str]) -> None:
    """Write one chat a line."""
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False) for prompt in prompts)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{file}: {len(prompts)} prompts")


def main() -> None:
    """Write the prompts that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--chats", type=int, default=5000, help="of them an eighth to rewrite (default: %(default)s)")
    parser.add_argument("--adapter-chats", type=int, default=1500, help="for each adapter (default: %(default)s)")
    parser.add_argument("--model", help="chat model that writes own.jsonl")
    parser.add_argument("--own", type=int, default=6000, help="turns that it writes (default: %(default)s)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rng = Random(0)
    learned, measured = chats(held_out=False), chats(held_out=True)
    rng.shuffle(learned)
    rng.shuffle(measured)
    rewritten = [rewriting(rng, held_out=False) for _ in range(options.chats // 8)]
    learned = learned[: options.chats - len(rewritten)] + rewritten
    rng.shuffle(learned)
    if options.model:
        write_prompts(options.folder / "own.jsonl", own_chats(options.model, options.own))
    write_prompts(options.folder / "chat.jsonl", learned)
    write_prompts(options.folder / "held-out-chat.jsonl", measured[:HELD_OUT])
    again = [rewriting(rng, held_out=True) for _ in range(HELD_OUT)]
    write_prompts(options.folder / "held-out-rewriting.jsonl", again)
    for task in TASKS:
        found = task_chats(rng, task)
        write_prompts(options.folder / f"held-out-{task}.jsonl", [next(found) for _ in range(HELD_OUT)])
        write_prompts(options.folder / f"{task}.jsonl", [next(found) for _ in range(options.adapter_chats)])


if __name__ == "__main__":
    main()
