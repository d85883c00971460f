"""Data sets: prompts of random tokens, with or without shared prefixes, of ShareGPT, or of a file."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequestError
from ..popularity import SKEWED as ZIPF
from ..popularity import UNIFORM, choose
from ..prompt_files import read_prompts
from ..prompts import random_ids
from .serving_commands import ROUND_ROBIN, SKEWED

OUTPUT_LEN = 128
"""Output tokens of a request without --output-len."""
_PREFIX_LEN = 256
_MIN_LENGTH, _MAX_PROMPT, _MAX_TOTAL = 4, 1024, 2048
"""Limits on the tokens of a ShareGPT conversation, as in vLLM's benchmark."""

Content = str | list[Any]


@dataclass(slots=True)
class Sample:
    """One request."""

    prompt: Content
    """A text, messages, or token ids."""
    num_prompt_tokens: int | None
    """Number of the prompt's tokens; None when not counted."""
    max_tokens: int
    adapter: str | None = None

    @property
    def is_ids(self) -> bool:
        """True when the prompt is token ids."""
        return isinstance(self.prompt, list) and all(type(item) is int for item in self.prompt)

    @property
    def is_messages(self) -> bool:
        """True when the prompt is a conversation."""
        return isinstance(self.prompt, list) and not self.is_ids


def make_samples(options: argparse.Namespace, tokenizer: Any | None, seed: int) -> list[Sample]:
    """Requests as `add_dataset` and `add_lengths` describe them; equal seeds give equal requests.

    Args:
        tokenizer: needed for all but jsonl.

    Raises:
        InvalidRequestError: names the option.
    """
    generator = random.Random(seed)
    name = options.dataset_name
    if name != "jsonl" and tokenizer is None:
        raise InvalidRequestError(f"the dataset {name} needs one", param="tokenizer")
    if name == "jsonl":
        return _jsonl(options)
    if name == "sharegpt":
        return _sharegpt(options, tokenizer, generator)
    return _random(options, tokenizer, generator)


def random_prompt(tokenizer: Any, length: int, generator: random.Random) -> list[int]:
    """Random token ids, none of them special."""
    return random_ids(generator, length, len(tokenizer), set(tokenizer.all_special_ids))


def _random(options: argparse.Namespace, tokenizer: Any, generator: random.Random) -> list[Sample]:
    prefix_len = options.prefix_len
    if prefix_len is None:
        prefix_len = _PREFIX_LEN if options.dataset_name == "prefix" else 0
    prefixes = [random_prompt(tokenizer, prefix_len, generator) for _ in range(options.num_prefixes)]
    samples = []
    for index in range(options.num_prompts):
        length = _vary(options.input_len, options.random_range_ratio, generator)
        prompt = prefixes[index % len(prefixes)] + random_prompt(tokenizer, length, generator)
        output_len = _vary(options.output_len or OUTPUT_LEN, options.random_range_ratio, generator)
        samples.append(Sample(prompt, len(prompt), output_len))
    return samples


def _vary(length: int, ratio: float, generator: random.Random) -> int:
    """Random length, uniform from (1 - ratio) to (1 + ratio) times `length`, and at least 1."""
    return generator.randint(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio))))


def _jsonl(options: argparse.Namespace) -> list[Sample]:
    samples = []
    for prompt in islice(cycle(read_prompts(Path(options.dataset_path), "dataset_path")), options.num_prompts):
        sample = Sample(prompt.content, None, options.output_len or OUTPUT_LEN, prompt.adapter)
        if sample.is_ids:
            sample.num_prompt_tokens = len(sample.prompt)
        samples.append(sample)
    return samples


def _sharegpt(options: argparse.Namespace, tokenizer: Any, generator: random.Random) -> list[Sample]:
    """First question of conversations, in random order; the output has the length of the answer."""
    pairs = _read_sharegpt(Path(options.dataset_path))
    generator.shuffle(pairs)
    samples: list[Sample] = []
    for question, answer in pairs:
        if len(samples) == options.num_prompts:
            break
        asked = len(tokenizer.encode(question))
        length = options.output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        short = asked < _MIN_LENGTH or (length < _MIN_LENGTH and options.output_len is None)
        if not short and asked <= _MAX_PROMPT and asked + length <= _MAX_TOTAL:
            samples.append(Sample(question, asked, length))
    if not samples:
        raise InvalidRequestError(
            f"{options.dataset_path} has no conversation of a usable length ({_MIN_LENGTH} to {_MAX_PROMPT} tokens, "
            f"{_MAX_TOTAL} with its answer)",
            param="dataset_path",
        )
    return [replace(sample) for sample in islice(cycle(samples), options.num_prompts)]


def _read_sharegpt(file: Path) -> list[tuple[str, str]]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error}", param="dataset_path") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{file} is not JSON: {error}", param="dataset_path") from None
    pairs = []
    for entry in data if isinstance(data, list) else ():
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        first, second = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
        if isinstance(first, str) and isinstance(second, str):
            pairs.append((first, second))
    if not pairs:
        raise InvalidRequestError(
            f"{file} holds no conversations: it must be a list of objects with conversations, each a list of turns "
            "with value",
            param="dataset_path",
        )
    return pairs


def assign_adapters(samples: Sequence[Sample], adapters: Sequence[str], assignment: str, seed: int) -> None:
    """Set the adapters of samples without one; without `adapters` they ask for the base model."""
    if not adapters:
        return
    if assignment == ROUND_ROBIN:
        indices = [index % len(adapters) for index in range(len(samples))]
    else:
        popularity = ZIPF if assignment == SKEWED else UNIFORM
        indices = choose(popularity, len(samples), len(adapters), 0, seed)
    for sample, index in zip(samples, indices, strict=True):
        if sample.adapter is None:
            sample.adapter = adapters[index]
