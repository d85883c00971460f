"""Models that one client may use, and the names by which it may ask for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...core.adapter_names import MARK, engine_name, split_engine_name
from ...core.errors import NotFoundError
from ...core.lora_request import MAX_PARTS, LoRARequest
from ...core.text import shorten
from ...tenancy.accounts.principal import Principal

if TYPE_CHECKING:
    from .model_registry import ModelRegistry

_OF_OTHERS = ("tier", "rows", "num_running", "num_waiting", "load_seconds")
"""Fields of a shared adapter's card that would reveal to a tenant how much others use it."""
_MAX_COMPARED = 256
"""Adapters among which an error looks for the name that was meant: a few milliseconds."""
_LONGEST_COMPARED = 64
"""Characters of a name that is compared with them."""
_SIMILAR = 0.8
"""Ratio of `difflib` from which a name counts as near: one letter wrong in five."""


class ModelView:
    """The base model, the adapters that all share and the tenant's own, of which one's own name wins; of these, what
    the tenant's and the key's limits allow. The base model is always allowed, and a tenant's limits say nothing of its
    own adapters.

    An adapter of another tenant does not exist here: a lookup does the same as for a name that is unknown.
    Those who run the server see it as "tenant/name".
    """

    def __init__(self, registry: ModelRegistry, principal: Principal) -> None:
        self._registry = registry
        self._tenant = principal.tenant
        self._is_admin = principal.is_admin
        shared, key = principal.tenant_limits.allowed_adapters, principal.key_limits.allowed_adapters
        self._shared_names = None if shared is None else frozenset(shared)
        self._key_names = None if key is None else frozenset(key)

    @property
    def base_name(self) -> str:
        """The first of the base model's names."""
        return self._registry.base_name

    def allows(self, name: str) -> bool:
        """True when the key may use an adapter of this plain name, whatever its owner."""
        return self._key_names is None or name in self._key_names

    def _allows_shared(self, name: str) -> bool:
        return self._shared_names is None or name in self._shared_names

    # --- names in requests ---

    def resolve(self, model: str | None) -> LoRARequest | None:
        """The adapter that `model` selects; None for the base model.

        Raises:
            NotFoundError: no model or adapter of that name.
        """
        if model is None or model in self._registry.base_names:
            return None
        adapter = next(filter(None, map(self._adapter, self._spellings(model))), None)
        if adapter is not None:
            return adapter
        raise NotFoundError(
            f"The model {shorten(model)!r} does not exist; /v1/models lists those that do", param="model"
        )

    def suggestion(self, name: str) -> str:
        """Advice for an error about an unknown model: the visible name that differs in case or by a letter or two."""
        known = self._registry.known()
        if len(known) > _MAX_COMPARED or len(name) > _LONGEST_COMPARED:
            return ""
        names = [*self._registry.base_names, *(shown for shown, _ in self._visible().values())]
        by_letters = {shown.lower(): shown for shown in reversed(names)}
        close = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=_SIMILAR)
        return f" (did you mean {shorten(by_letters[close[0]])!r}?)" if close else ""

    def is_adapter(self, name: str) -> bool:
        """True when an adapter or the base model has this name, or an adapter had it: it is no sum then."""
        try:
            self.resolve(name)
        except NotFoundError:
            return self.was_adapter(name)
        return True

    def was_adapter(self, name: str) -> bool:
        """True when an adapter of this name, which this client could have used, was unloaded."""
        owners = dict.fromkeys((self._tenant, ""))
        return MARK not in name and any(
            self._registry.was_adapter(engine_name(tenant, spelled))
            for spelled in self._spellings(name)
            for tenant in owners
        )

    def _spellings(self, name: str) -> Iterator[str]:
        """The name, and its part after a base model's name and a colon."""
        yield name
        for base in self._registry.base_names:
            if name.startswith(f"{base}:"):
                yield name[len(base) + 1 :]

    def _adapter(self, name: str) -> LoRARequest | None:
        if MARK in name or not self.allows(name):
            return None
        own = self._registry.adapter(engine_name(self._tenant, name)) if self._tenant else None
        shared = self._registry.adapter(name) if self._allows_shared(name) else None
        found = own or shared
        if found is None and self._is_admin:
            tenant, _, rest = name.partition("/")
            found = self._registry.adapter(engine_name(tenant, rest)) if rest else None
        return found

    async def discover(self, model: str | None, parts: Sequence[str] = ()) -> None:
        """Look for adapters that are not loaded, so that `resolve` knows them: all that `model`, maybe a weighted
        sum, and the adapters `parts` may name.

        Raises:
            AdapterError: there is one that may not be read.
            OutriderError: a plug-in failed.
        """
        names = self._names_in([model or "", *parts[:MAX_PARTS]])
        await self._registry.discover(name for name in names if self.allows(name) and self._allows_shared(name))

    def _names_in(self, texts: Sequence[str]) -> Iterator[str]:
        """Every adapter's name that the texts may hold: with a base model's name before it, a weight after it, in a
        sum."""
        for text in texts:
            for piece in (text, text.removeprefix("+"), *text.split("+")[: MAX_PARTS + 1]):
                for name in (piece, piece.rpartition(":")[0]):
                    yield from self._spellings(name)

    # --- cards ---

    def cards(self) -> list[dict[str, Any]]:
        """One OpenAI model card a name, as of the registry's last `refresh`."""
        adapters = self._visible()
        return self._registry.base_cards() + [self._card(name, *entry) for name, entry in adapters.items()]

    def card(self, name: str) -> dict[str, Any]:
        """The card of `name`, which may be `base:adapter`; NotFoundError when there is none."""
        adapter = self.resolve(name)
        if adapter is None:
            cards = self._registry.base_cards()
            return next((card for card in cards if card["id"] == name), cards[0])
        return self._card(adapter.name, *self._visible()[adapter.name])

    def _visible(self) -> dict[str, tuple[str, str]]:
        """Engine's name -> (how this client calls it, where it comes from)."""
        known = self._registry.known()
        visible: dict[str, tuple[str, str]] = {}
        for name, root in known.items():
            tenant, public = split_engine_name(name)
            full = f"{tenant}/{public}"
            if not (self.allows(public) or (self._is_admin and self.allows(full))):
                continue
            if not tenant:
                hidden = bool(self._tenant) and engine_name(self._tenant, name) in known
                if self._allows_shared(name) and (not hidden or self._is_admin):
                    visible[name] = (name, root)
            elif self._is_admin:
                visible[name] = (full, root)
            elif tenant == self._tenant:
                visible[name] = (public, root)
        return visible

    def _card(self, name: str, shown: str, root: str) -> dict[str, Any]:
        card = self._registry.adapter_card(name, shown, root)
        if self._tenant and not self._is_admin and "tenant" not in card:
            for field in _OF_OTHERS:
                del card[field]
        return card
