"""Facts from a server: its model, the folder of its weights, and its counts of speculation."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from .....models.checkpoint.paths import resolve_model_path
from .....models.checkpoint.tokenizer import load_tokenizer
from ....core.errors import InvalidRequestError, NotFoundError, OutriderError
from ....core.messages import SpeculationCounts
from .http_client import HttpClient, RequestFailed

_SAMPLE = re.compile(r"^(?:outrider|vllm):spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


class ServedModel(NamedTuple):
    """The measured model."""

    name: str
    root: str | None
    """Folder of the weights, as the server names it."""


async def find_model(client: HttpClient, name: str | None, option: str = "model") -> ServedModel:
    """Find the model called `name`, or the server's first one; errors name `option`.

    Raises:
        InvalidRequestError: no server, or one that lists no models. NotFoundError: no model of that name.
    """
    try:
        response = await client.get("/v1/models")
    except RequestFailed as error:
        raise InvalidRequestError(str(error), param="base_url") from None
    if response.status in (401, 403):
        raise InvalidRequestError(f"the server answers {response.status}: is the key right?", param="api_key")
    try:
        cards = response.json()["data"] if response.status == 200 else []
    except (RequestFailed, KeyError, TypeError):
        cards = []
    known = {str(card["id"]): card.get("root") for card in cards if isinstance(card, dict) and "id" in card}
    if not known:
        if name is not None:  # some servers list no models and still answer
            return ServedModel(name, None)
        raise InvalidRequestError(f"the server lists no models (status {response.status})", param="model")
    if name is not None and name not in known:
        # An adapter that a server finds by name may be missing in the list until its first request.
        if (await client.get(f"/v1/models/{quote(name, safe='/:@')}")).status == 200:
            return ServedModel(name, None)
        raise NotFoundError(f"the server has no model {name!r}; it has {', '.join(known)}", param=option)
    chosen = name if name is not None else next(iter(known))
    return ServedModel(chosen, known[chosen])


def find_tokenizer(given: str | None, model: ServedModel) -> tuple[Any | None, Path | None]:
    """Load the tokenizer of --tokenizer, else that beside the model's weights, if they are on this machine.

    Returns:
        (the tokenizer or None, its folder).

    Raises:
        OutriderError: the named tokenizer cannot be loaded.
    """
    if given is not None:
        try:
            path = resolve_model_path(given)
            return load_tokenizer(path), path
        except OutriderError as error:
            raise type(error)(error.message, param="tokenizer") from None
    for place in (model.root, model.name):
        if place is None:
            continue
        try:
            path = Path(place) if Path(place).is_dir() else resolve_model_path(place)
            return load_tokenizer(path), path
        except (OutriderError, OSError):
            continue
    return None, None


async def speculation_counts(client: HttpClient) -> SpeculationCounts | None:
    """Counts of speculation so far, from the server's /metrics; None without them."""
    try:
        response = await client.get("/metrics")
    except RequestFailed:
        return None
    if response.status != 200:
        return None
    totals: dict[str, float] = defaultdict(float)
    positions: dict[int, float] = defaultdict(float)
    for name, labels, value in _SAMPLE.findall(response.body.decode(errors="replace")):
        position = _POSITION.search(labels)
        if name == "accepted_tokens_per_pos" and position is not None:
            positions[int(position[1])] += float(value)
        else:
            totals[name] += float(value)
    if "drafts" not in totals:
        return None
    per_pos = [int(positions[i]) for i in range(max(positions, default=-1) + 1)]
    return SpeculationCounts(
        int(totals["drafts"]), int(totals["draft_tokens"]), int(totals["accepted_tokens"]), per_pos
    )


def since(before: SpeculationCounts | None, after: SpeculationCounts | None) -> SpeculationCounts:
    """Difference between two readings of the counts."""
    return SpeculationCounts() if before is None or after is None else after.since(before)
