"""Samples from JSONL files, and batches of them that depend on the seed and the epoch alone.

A line is one of

    {"prompt": text}  {"messages": [...]}                         for --generate: the target writes the completion
    {"prompt": text, "completion": text}                          the completion is learned
    {"messages": [..., {"role": "assistant", "content": text}]}   the last answer is learned
    {"text": text}  {"token_ids": [...]}                          all of it is learned
    {"prompt_token_ids": [...], "completion_token_ids": [...]}    as --generate writes them
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...platform.core.errors import InvalidRequestError, NotFoundError
from .options import reason

_POOL = 32  # batches' worth of samples that are sorted by length together
_DRAFT_SIZES = (8192, 16384, 32768)
_COVERED = 0.97  # share of the tokens of samples that did not count
_CHECKED = 8  # every such sample is one of those
_MIN_LABELS = 2  # a sample with fewer tokens to learn teaches nothing: the first is the target's own


class Sample(NamedTuple):
    """A sequence to learn from."""

    token_ids: list[int]
    num_prompt_tokens: int
    """Leading tokens that are given, not learned."""


class Batch(NamedTuple):
    """Samples padded on the right to one length."""

    ids: Tensor
    """[B, T] int64."""
    learned: Tensor
    """[B, T] bool: tokens to guess; False for prompts and padding."""


def _bad(where: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {message}", param="data")


def _ids(record: dict[str, Any], name: str, where: str, vocab_size: int) -> list[int]:
    value = record[name]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise _bad(where, f"{name} must be a list of integers")
    if any(not 0 <= item < vocab_size for item in value):
        raise _bad(where, f"{name} must be in [0, {vocab_size}), the model's vocabulary")
    return value


def _text(record: dict[str, Any], name: str, where: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value:
        raise _bad(where, f"{name} must be a non-empty string, got {value!r:.40}")
    return value


class Reader:
    """Reads lines with a model's tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def prompts(self, path: str | Path) -> list[list[int]]:
        """The prompts of a file, as token ids; given completions are left out.

        Raises:
            NotFoundError, InvalidRequestError: names the file, and the line.
        """
        prompts = []
        for where, record in _records(path):
            prompt, _ = self._parse(record, where)
            if not prompt:
                raise _bad(where, "--generate needs a prompt or messages to complete")
            prompts.append(prompt)
        return prompts

    def samples(self, path: str | Path, max_length: int) -> list[Sample]:
        """The samples of a file, cut to `max_length`; those that become too short are dropped.

        Raises:
            NotFoundError, InvalidRequestError: names the file, and the line.
        """
        found = []
        for where, record in _records(path):
            prompt, completion = self._parse(record, where)
            if completion is None:
                raise _bad(where, "there is no completion; give one, or use --generate")
            sample = Sample((prompt + completion)[:max_length], len(prompt))
            if len(sample.token_ids) - max(1, len(prompt)) >= _MIN_LABELS:
                found.append(sample)
        if not found:
            raise _bad(str(path), f"no sample has {_MIN_LABELS} tokens to learn within --max-length {max_length}")
        return found

    def _parse(self, record: dict[str, Any], where: str) -> tuple[list[int], list[int] | None]:
        """Prompt and completion; no prompt when everything is to be learned."""
        if "prompt_token_ids" in record:
            prompt = _ids(record, "prompt_token_ids", where, self._vocab_size)
            given = "completion_token_ids" in record
            return prompt, _ids(record, "completion_token_ids", where, self._vocab_size) if given else None
        if "token_ids" in record:
            return [], _ids(record, "token_ids", where, self._vocab_size)
        if "text" in record:
            return [], self._encode(_text(record, "text", where), where)
        if "messages" in record:
            return self._chat(record["messages"], where)
        if "prompt" in record:
            prompt = self._encode(_text(record, "prompt", where), where)
            if record.get("completion") is None:
                return prompt, None
            return prompt, self._answer(_text(record, "completion", where), where)
        known = "prompt, messages, text, token_ids, prompt_token_ids"
        raise _bad(where, f"none of {known} is in the line, which has {', '.join(map(repr, record)) or 'nothing'}")

    def _chat(self, messages: Any, where: str) -> tuple[list[int], list[int] | None]:
        good = (
            isinstance(messages, list)
            and messages
            and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in messages
            )
        )
        if not good:
            raise _bad(where, "messages must be a non-empty list of objects with a role and a content, both strings")
        answer = messages[-1]["content"] if messages[-1]["role"] == "assistant" else None
        asked = messages if answer is None else messages[:-1]
        if not asked:
            raise _bad(where, "messages has no turn before the answer")
        try:
            text = self._tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like; jinja's errors have no common base either
            raise _bad(where, f"the chat template refuses the messages: {reason(error)}") from error
        prompt = self._encode(text, where, special=False)
        return prompt, None if answer is None else self._answer(answer, where)

    def _answer(self, text: str, where: str) -> list[int]:
        eos = self._tokenizer.eos_token_id
        return self._encode(text, where, special=False) + ([] if eos is None else [eos])

    def _encode(self, text: str, where: str, special: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _bad(where, f"the text holds half of a surrogate pair: {reason(error)}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        if ids and max(ids) >= self._vocab_size:
            raise _bad(where, f"the tokenizer gives token {max(ids)}, the model has {self._vocab_size}")
        return ids


def _records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object) of each line that is not blank."""
    try:
        # `splitlines` would also break at separators that JSON allows inside strings.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(f"cannot read {path}: {reason(error)}", param="data") from error
    empty = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        empty, where = False, f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad(where, f"not valid JSON: {error}") from None
        if not isinstance(record, dict):
            raise _bad(where, "not a JSON object")
        yield where, record
    if empty:
        raise _bad(str(path), "the file has no lines")


def check_held_out(count: int, available: int) -> None:
    """Raises InvalidRequestError if no samples would be left to learn from."""
    if count >= available:
        raise InvalidRequestError(
            f"--held-out {count} leaves nothing of {available} samples to learn from", param="held_out"
        )


def hold_out(samples: Sequence[Sample], count: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Split into samples to learn from and `count` to measure on.

    Raises:
        InvalidRequestError: nothing would be left to learn from.
    """
    check_held_out(count, len(samples))
    chosen = set(Random(f"held out {seed}").sample(range(len(samples)), count))
    return [s for i, s in enumerate(samples) if i not in chosen], [samples[i] for i in sorted(chosen)]


def plan_batches(samples: Sequence[Sample], batch_tokens: int, seed: int) -> list[list[int]]:
    """Batches of sample indices, the same in every epoch; those of a batch have similar lengths.

    A batch holds at most `batch_tokens` tokens with its padding, or one sample that is longer.
    """
    rng = Random(f"order {seed}")
    order = list(range(len(samples)))
    rng.shuffle(order)
    mean = sum(len(sample.token_ids) for sample in samples) / len(samples)
    size = max(1, int(_POOL * batch_tokens / mean))
    batches: list[list[int]] = []
    for start in range(0, len(order), size):
        pool = sorted(order[start : start + size], key=lambda i: len(samples[i].token_ids))
        batch: list[int] = []
        for index in pool:
            if batch and len(samples[index].token_ids) * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return batches


def plan_epoch(num_batches: int, seed: int, epoch: int) -> list[int]:
    """The order of the batches in an epoch."""
    order = list(range(num_batches))
    Random(f"order {seed} {epoch}").shuffle(order)
    return order


def collate(samples: Sequence[Sample], device: torch.device) -> Batch:
    """Pad samples on the right with token 0, which earlier tokens do not attend to."""
    length = max(len(sample.token_ids) for sample in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    learned = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        learned[row, max(1, sample.num_prompt_tokens) : len(sample.token_ids)] = True
    return Batch(ids.to(device), learned.to(device))


def learned_tokens(samples: Iterable[Sample]) -> Counter[int]:
    """Number of times that each token is learned."""
    seen: Counter[int] = Counter()
    for sample in samples:
        seen.update(sample.token_ids[sample.num_prompt_tokens :])
    return seen


def choose_vocab_size(samples: Sequence[Sample], vocab_size: int) -> int:
    """Size of the draft vocabulary for a target's: the smallest of `_DRAFT_SIZES` that covers `_COVERED`, or the last.

    It is chosen from most samples and checked on the others, since few samples do not contain all tokens. A
    vocabulary of at most twice the smallest is used whole: beyond it the lm_head is most of a head's work.
    """
    if vocab_size <= 2 * _DRAFT_SIZES[0]:
        return vocab_size
    others = learned_tokens(samples[::_CHECKED])
    for size in _DRAFT_SIZES:
        chosen = frequent_tokens((s for i, s in enumerate(samples) if i % _CHECKED), min(size, vocab_size))
        if sum(others[token] for token in chosen) >= _COVERED * others.total():
            return len(chosen)
    return min(_DRAFT_SIZES[-1], vocab_size)


def frequent_tokens(samples: Iterable[Sample], count: int, always: Iterable[int] = ()) -> list[int]:
    """The `count` most frequent learned tokens, ascending, `always` among them; unseen ones fill up by id.

    Tokenizers give the lowest ids to early merges, which are frequent.
    """
    seen = learned_tokens(samples)
    ranked = dict.fromkeys([*always, *sorted(seen, key=lambda token: (-seen[token], token))])
    unseen = (token for token in itertools.count() if token not in ranked)
    return sorted(itertools.islice(itertools.chain(ranked, unseen), count))
