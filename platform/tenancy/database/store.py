"""Tenants, keys, shared prefixes and adapters in the database. Blocking calls: on a thread, never on the event loop.

Every change counts the directory's revision up in its own transaction, so that all servers see it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from ...core.errors import InvalidRequestError, InvalidUserInputError, NotFoundError
from ...core.labels import DEFAULT_TENANT, OTHER
from ..accounts.keys import make_key
from ..accounts.principal import SCOPES, Limits, Scope, merge_limits
from ..accounts.records import Key, SharedPrefix, StoredAdapter, Tenant
from ..times import MAX_TIME
from .audit import Actor, forget_old_notes, write_line, write_row
from .connection import Database
from .schema import MAX_NAME, adapters, api_keys, revisions, shared_prefixes, tenants

T = TypeVar("T")

DIRECTORY = "directory"
"""The name of the one revision there is."""
MAX_WEIGHT = 1e6
MAX_ADAPTERS = 1_000_000
"""Largest number of adapters that a tenant may be allowed to load."""
MAX_PREFIX_TOKENS = 1 << 20
MAX_TOKEN_ID = (1 << 31) - 1

RESERVED_NAMES = (DEFAULT_TENANT, OTHER)
"""Words of the metrics' labels: a tenant of that name could not be distinguished from no tenant, or from many."""

_SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Store:
    """Changes that administrators make. Every name that does not exist is a NotFoundError."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time, actor: Actor | None = None) -> None:
        """`actor`: author of the changes, for the audit log."""
        self._database = database
        self._clock = clock
        self._actor = actor or Actor()

    def by(self, actor: Actor) -> Store:
        """The store for changes by another actor."""
        return Store(self._database, self._clock, actor)

    def note(self, action: str) -> None:
        """Record a change that was made elsewhere. Only a tenant's last ones are kept."""
        write_line(self._actor, action)
        with self._database.write() as connection:
            write_row(connection, self._clock(), self._actor, action)
            if self._actor.tenant:
                forget_old_notes(connection, self._actor.tenant)

    # --- tenants ---

    def create_tenant(self, tenant: Tenant) -> Tenant:
        """Add a tenant, with `created_at` as of now.

        Raises:
            InvalidRequestError: a field is out of its range.
            InvalidUserInputError: the name is taken, or was once.
        """
        _check_tenant(tenant)
        if tenant.name in RESERVED_NAMES:
            raise _out_of_range("name", f"{' and '.join(RESERVED_NAMES)} are taken by labels of the metrics")
        tenant = dataclasses.replace(tenant, created_at=self._clock())
        try:
            with self._changing(f"created tenant {tenant.name}") as connection:
                connection.execute(insert(tenants).values(msgspec.to_builtins(tenant)))
        except IntegrityError:
            raise InvalidUserInputError(
                f"There is, or was, a tenant {tenant.name!r}: names are never given again", param="name"
            ) from None
        return tenant

    def list_tenants(self) -> list[Tenant]:
        """Tenants, sorted by name."""
        with self._database.read() as connection:
            return read_tenants(connection)

    def get_tenant(self, name: str) -> Tenant:
        """The tenant of this name."""
        with self._database.read() as connection:
            return _tenant(connection, name)

    def update_tenant(self, name: str, changes: Mapping[str, Any]) -> Tenant:
        """Change fields of a tenant. `limits` holds the limits that change; one that is None is taken away.

        Raises:
            InvalidRequestError: a field is out of its range, or cannot be changed.
        """
        _check_changeable(changes, ("weight", "limits", "max_adapters", "disabled"))
        with self._changing(f"updated tenant {name}: {_shown(changes)}") as connection:
            old = _tenant(connection, name)
            limits = merge_limits(changes.get("limits") or {}, old.limits)
            new = dataclasses.replace(old, **(dict(changes) | {"limits": limits}))
            _check_tenant(new)
            connection.execute(update(tenants).where(tenants.c.name == name).values(msgspec.to_builtins(new)))
        return new

    def delete_tenant(self, name: str) -> None:
        """Revoke its keys, forget its adapters, and keep its name from being given again. Its usage stays."""
        now = self._clock()
        with self._changing(f"deleted tenant {name}") as connection:
            _tenant(connection, name)
            connection.execute(update(tenants).where(tenants.c.name == name).values(deleted_at=now))
            mine = (api_keys.c.tenant == name) & api_keys.c.revoked_at.is_(None)
            connection.execute(update(api_keys).where(mine).values(revoked_at=now))
            connection.execute(delete(adapters).where(adapters.c.tenant == name))

    # --- keys ---

    def create_key(
        self,
        tenant: str,
        *,
        name: str = "",
        scopes: Sequence[Scope] = ("inference",),
        limits: Limits | None = None,
        expires_at: float | None = None,
    ) -> tuple[Key, str]:
        """A new key of a tenant, and the key itself, which is kept nowhere.

        Raises:
            InvalidRequestError: a field is out of its range.
        """
        made = make_key()
        key = Key(
            id=made.id,
            tenant=tenant,
            name=name,
            prefix=made.prefix,
            scopes=tuple(dict.fromkeys(scopes)),
            limits=limits or Limits(),
            created_at=self._clock(),
            expires_at=expires_at,
        )
        self._check_key(key)
        action = f"created key {key.id} of tenant {tenant} with the scopes {', '.join(key.scopes)}"
        with self._changing(action) as connection:
            _tenant(connection, tenant)
            connection.execute(insert(api_keys).values(msgspec.to_builtins(key) | {"digest": made.digest}))
        return key, made.secret

    def list_keys(self, tenant: str | None = None, *, revoked: bool = False) -> list[Key]:
        """Keys, oldest first; those of one tenant, and the revoked ones, if requested."""
        with self._database.read() as connection:
            if tenant is not None:
                _tenant(connection, tenant)
            query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
            if tenant is not None:
                query = query.where(api_keys.c.tenant == tenant)
            if not revoked:
                query = query.where(api_keys.c.revoked_at.is_(None))
            return [read_record(Key, row) for row in connection.execute(query)]

    def get_key(self, key_id: str) -> Key:
        """The key of this id, also when it has been revoked."""
        with self._database.read() as connection:
            return _key(connection, key_id)

    def update_key(self, key_id: str, changes: Mapping[str, Any]) -> Key:
        """Change fields of a key, as `update_tenant` does. Its scopes never change: make another key."""
        _check_changeable(changes, ("name", "limits", "expires_at"))
        with self._changing(f"updated key {key_id}: {_shown(changes)}") as connection:
            old = _key(connection, key_id)
            if old.revoked_at is not None:
                raise InvalidUserInputError(f"The key {key_id!r} has been revoked", param="id")
            limits = merge_limits(changes.get("limits") or {}, old.limits)
            new = dataclasses.replace(old, **(dict(changes) | {"limits": limits}))
            self._check_key(new)
            connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(msgspec.to_builtins(new)))
        return new

    def revoke_key(self, key_id: str) -> Key:
        """Let a key in no more; revoking it again changes nothing."""
        with self._changing(f"revoked key {key_id}") as connection:
            key = _key(connection, key_id)
            if key.revoked_at is None:
                key = dataclasses.replace(key, revoked_at=self._clock())
                connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=key.revoked_at))
        return key

    def _check_key(self, key: Key) -> None:
        _check_text("name", key.name, MAX_NAME)
        if not key.scopes or not set(key.scopes) <= set(SCOPES):
            raise _out_of_range("scopes", f"must be one or more of {', '.join(SCOPES)}")
        if key.expires_at is not None and not self._clock() < key.expires_at <= MAX_TIME:
            raise _out_of_range("expires_at", "must be in the future, in seconds since 1970, or null")

    # --- shared prefixes ---

    def add_prefix(self, name: str, token_ids: Sequence[int]) -> SharedPrefix:
        """Declare a shared prefix: prompts that begin with these tokens share that prefix's KV among all tenants.

        Raises:
            InvalidRequestError: the name or the tokens are no such.
            InvalidUserInputError: the name is taken.
        """
        _check_slug(name)
        if not 1 <= len(token_ids) <= MAX_PREFIX_TOKENS:
            raise _out_of_range("token_ids", f"must be 1 to {MAX_PREFIX_TOKENS} token ids, got {len(token_ids)}")
        if not all(0 <= token <= MAX_TOKEN_ID for token in token_ids):
            raise _out_of_range("token_ids", f"must be integers from 0 to {MAX_TOKEN_ID}")
        prefix = SharedPrefix(name=name, token_ids=tuple(token_ids), created_at=self._clock())
        try:
            with self._changing(f"declared the shared prefix {name} of {len(token_ids)} tokens") as connection:
                connection.execute(insert(shared_prefixes).values(msgspec.to_builtins(prefix)))
        except IntegrityError:
            raise InvalidUserInputError(f"There is a shared prefix {name!r} already", param="name") from None
        return prefix

    def list_prefixes(self) -> list[SharedPrefix]:
        """Shared prefixes, sorted by name."""
        with self._database.read() as connection:
            return read_prefixes(connection)

    def remove_prefix(self, name: str) -> None:
        """Remove a shared prefix."""
        with self._changing(f"removed the shared prefix {name}") as connection:
            done = connection.execute(delete(shared_prefixes).where(shared_prefixes.c.name == name))
            if not done.rowcount:
                raise NotFoundError(f"There is no shared prefix {name[:MAX_NAME]!r}", param="name")

    # --- adapters that were loaded over HTTP ---

    def put_adapter(self, adapter: StoredAdapter, max_adapters: int | None = None) -> StoredAdapter:
        """Remember an adapter, in place of one of the same tenant and name; returns it as it is remembered.

        Args:
            max_adapters: that the tenant may have, this one included.

        Raises:
            InvalidUserInputError: it has as many.
        """
        mine = (adapters.c.tenant == adapter.tenant) & (adapters.c.name == adapter.name)
        adapter = dataclasses.replace(adapter, created_at=self._clock())
        with self._changing() as connection:
            if adapter.tenant:
                _tenant(connection, adapter.tenant)
            connection.execute(delete(adapters).where(mine))
            count = select(func.count()).select_from(adapters).where(adapters.c.tenant == adapter.tenant)
            if max_adapters is not None and connection.execute(count).scalar_one() >= max_adapters:
                raise InvalidUserInputError(
                    f"The tenant has {max_adapters} adapters of its own, as many as it may have; unload one first",
                    param="lora_name",
                )
            connection.execute(insert(adapters).values(msgspec.to_builtins(adapter)))
        return adapter

    def set_adapter_pinned(self, tenant: str, name: str, pinned: bool) -> None:
        """Record that an adapter is pinned or not; one that is not stored is ignored."""
        mine = (adapters.c.tenant == tenant) & (adapters.c.name == name)
        with self._changing() as connection:
            connection.execute(update(adapters).where(mine).values(pinned=pinned))

    def remove_adapter(self, tenant: str, name: str) -> bool:
        """Remove an adapter; returns True when it was stored. One that is not stored changes nothing: tenants may ask
        for any name, and every change makes all servers read the directory."""
        mine = (adapters.c.tenant == tenant) & (adapters.c.name == name)
        with self._database.read() as connection:
            if connection.execute(select(adapters.c.id).where(mine)).first() is None:
                return False
        with self._changing() as connection:
            return bool(connection.execute(delete(adapters).where(mine)).rowcount)

    def list_adapters(self) -> list[StoredAdapter]:
        """Stored adapters, oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(adapters).order_by(adapters.c.created_at, adapters.c.id))
            return [read_record(StoredAdapter, row) for row in rows]

    # --- revisions ---

    @contextlib.contextmanager
    def _changing(self, action: str | None = None) -> Iterator[Connection]:
        """A transaction that counts the directory's revision up first: on PostgreSQL that row's lock makes changes wait
        for each other, so that no server sees a later number without an earlier change. With an `action` it is in the
        audit, too."""
        with self._database.write() as connection:
            connection.execute(
                update(revisions).where(revisions.c.name == DIRECTORY).values(number=revisions.c.number + 1)
            )
            yield connection
            if action is not None:
                write_row(connection, self._clock(), self._actor, action)
        if action is not None:
            write_line(self._actor, action)


def read_revision(connection: Connection) -> int:
    """The directory's revision; 0 before any change."""
    return connection.scalar(select(revisions.c.number).where(revisions.c.name == DIRECTORY)) or 0


def read_tenants(connection: Connection) -> list[Tenant]:
    """Tenants that have not been deleted, by name."""
    query = select(tenants).where(tenants.c.deleted_at.is_(None)).order_by(tenants.c.name)
    return [read_record(Tenant, row) for row in connection.execute(query)]


def read_prefixes(connection: Connection) -> list[SharedPrefix]:
    """Shared prefixes, sorted by name."""
    rows = connection.execute(select(shared_prefixes).order_by(shared_prefixes.c.name))
    return [read_record(SharedPrefix, row) for row in rows]


def _tenant(connection: Connection, name: str) -> Tenant:
    row = connection.execute(select(tenants).where(tenants.c.name == name, tenants.c.deleted_at.is_(None))).first()
    if row is None:
        raise NotFoundError(f"There is no tenant {name[:MAX_NAME]!r}", param="tenant")
    return read_record(Tenant, row)


def read_record(kind: type[T], row: Row[Any]) -> T:
    """A row as one of the dataclasses in `accounts.records`.

    Raises:
        InvalidRequestError: it has what this version does not know, such as another limit: it must not count as none.
    """
    try:
        return msgspec.convert(row, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"a row of the database cannot be read: {error}") from None


def _key(connection: Connection, key_id: str) -> Key:
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    if row is None:
        raise NotFoundError(f"There is no key {key_id[:MAX_NAME]!r}", param="id")
    return read_record(Key, row)


def _check_slug(name: str) -> None:
    if not _SLUG.fullmatch(name):
        raise _out_of_range("name", "must be 1 to 64 of a-z 0-9 . _ -, the first a letter or digit")


def _check_tenant(tenant: Tenant) -> None:
    _check_slug(tenant.name)
    if not (math.isfinite(tenant.weight) and 1 / MAX_WEIGHT <= tenant.weight <= MAX_WEIGHT):
        raise _out_of_range("weight", f"must be from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}")
    if not 0 <= tenant.max_adapters <= MAX_ADAPTERS:
        raise _out_of_range("max_adapters", f"must be from 0 to {MAX_ADAPTERS}")


def _check_text(field: str, text: str, longest: int) -> None:
    if len(text) > longest or not (text.isprintable() or not text):
        raise _out_of_range(field, f"must be at most {longest} printable characters")


def _shown(changes: Mapping[str, Any]) -> str:
    """Fields and their new values, for the audit."""
    fields = {name: value for name, value in changes.items() if name != "limits"}
    fields |= {f"limits.{name}": value for name, value in (changes.get("limits") or {}).items()}
    return ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in fields.items()) or "nothing"


def _check_changeable(changes: Mapping[str, Any], fields: Iterable[str]) -> None:
    for name in changes:
        if name not in tuple(fields):
            raise _out_of_range(name, f"cannot be changed; {', '.join(fields)} can")


def _out_of_range(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {problem}", param=field)
