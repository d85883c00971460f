"""Folders and sources from which adapters may be loaded over HTTP.

Those who run the server load from local folders below the allowed roots, and from other sources by their schemes. A
tenant loads from its own folder alone, the one of its name in a root: its neighbours belong to other tenants, and other
sources would be read with the server's credentials.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...client.adapters.sources.folders import MAX_PATH, CheckedFolder, FolderRules
from ...client.adapters.sources.resolver import (
    LOCAL_SCHEMES,
    is_hub_id,
    local_path,
    no_adapter,
    shown_source,
    source_scheme,
)
from ...client.adapters.sources.shared_memory import SHARED_MEMORY
from ...core.adapter_files import ANYWHERE, is_inside, real_roots
from ...core.errors import AdapterError
from ...core.lora_request import LoRARequest
from ..server_config import ServerConfig
from .adapter_bodies import LoadAdapterRequest


class Admitted(NamedTuple):
    """A load that is allowed."""

    request: LoRARequest
    """The adapter, with the real paths of local folders."""
    folders: dict[str, CheckedFolder]
    """Folders as they were when checked, by the field that named them."""


class AdapterPolicy:
    """Checks of the folders and sources that loads name."""

    def __init__(self, config: ServerConfig) -> None:
        self._rules = FolderRules(real_roots([*_roots(config)]), config.lora_sources.max_adapter_bytes)
        self._schemes = frozenset(config.lora_remote)
        self._tenant_roots = config.lora_roots
        self._server_roots = real_roots([*config.lora_roots, *config.lora_sources.directories])

    async def admit(self, body: LoadAdapterRequest, tenant: str | None = None) -> Admitted:
        """Check where a load wants to read; disks are looked at in a thread.

        Args:
            tenant: who loads; None for those who run the server.

        Raises:
            AdapterError: it may not be read there; `param` names the field.
        """
        assert body.lora_path is not None
        path, folder = await asyncio.to_thread(self._admit_for, tenant, body.lora_path, "lora_path")
        folders = {} if folder is None else {"lora_path": folder}
        draft_path = body.draft_path
        if draft_path is not None:
            draft_path, folder = await asyncio.to_thread(self._admit_for, tenant, draft_path, "draft_path")
            folders |= {} if folder is None else {"draft_path": folder}
        paths = path, draft_path
        # A tenant may move its folders about meanwhile: whatever they lead to by now, its own roots hold.
        roots = self._roots_of_tenant(tenant) if tenant is not None else self.allowed_roots(paths, body.tenant or "")
        return Admitted(LoRARequest(body.lora_name, path=path, draft_path=draft_path, roots=roots), folders)

    def allowed_roots(self, paths: Iterable[str | None], tenant: str) -> tuple[str, ...]:
        """Folders out of which no file of an adapter in these folders may lie: those of its tenant, else those of the
        server. One that lies elsewhere, such as one of `--lora-modules`, may have files anywhere. `()` for sources that
        are to be fetched."""
        own = self._roots_of_tenant(tenant) if tenant else ()
        found: dict[str, None] = {}
        for path in paths:
            if path is not None and source_scheme(path) in (None, *LOCAL_SCHEMES):
                local = os.path.normpath(local_path(path))
                if is_inside(local, own):  # wherever links in it lead to by now
                    found |= dict.fromkeys(own)
                    continue
                real = os.path.realpath(local)
                roots = next((roots for roots in (own, self._server_roots) if is_inside(real, roots)), ANYWHERE)
                found |= dict.fromkeys(roots)
        return tuple(found)

    def _roots_of_tenant(self, tenant: str) -> tuple[str, ...]:
        return real_roots([os.path.join(root, tenant) for root in self._tenant_roots])

    def _admit_for(self, tenant: str | None, source: str, field: str) -> tuple[str, CheckedFolder | None]:
        return self._admit(source, field) if tenant is None else self._admit_own(tenant, source, field)

    def _admit_own(self, tenant: str, source: str, field: str) -> tuple[str, CheckedFolder | None]:
        """Admit a tenant's source. A path that does not begin with a slash is one in the tenant's folder. Paths outside
        are refused in the same words whether they exist or not."""
        outside = no_adapter(f"{field}: {shown_source(source)!r} is outside this tenant's folder of adapters", field)
        if "://" in source or "\0" in source or len(source) > MAX_PATH:
            raise outside
        homes = [os.path.join(root, tenant) for root in self._tenant_roots]
        for home in homes:
            rules = FolderRules(real_roots([home]), self._rules.max_bytes)
            path = os.path.join(home, os.path.expanduser(source))
            real, root = os.path.realpath(path), rules.roots[0]
            if (real == root or real.startswith(root + os.sep)) and (home == homes[-1] or os.path.isdir(real)):
                folder = rules.check(path, field)
                return folder.path, folder
        raise outside

    def check_shared_memory(self) -> None:
        """Check that shared memory may be read, as a root; AdapterError otherwise."""
        if not is_inside(os.path.realpath(SHARED_MEMORY), self._rules.roots):
            raise no_adapter(
                "lora_shm: shared memory is read over HTTP only when the server runs with --lora-root " + SHARED_MEMORY,
                "lora_shm",
            )

    async def check_again(self, admitted: Admitted) -> None:
        """Check that no folder has changed since it was checked, so that it is known what has been read; AdapterError
        otherwise."""
        for field, folder in admitted.folders.items():
            await asyncio.to_thread(self._rules.check_again, folder, field)

    def _admit(self, source: str, field: str) -> tuple[str, CheckedFolder | None]:
        scheme = source_scheme(source)
        if scheme is not None and scheme not in LOCAL_SCHEMES:
            if scheme in self._schemes:
                return source, None
            if "://" in source:
                raise no_adapter(
                    f"{field}: {shown_source(source)!r} is refused: adapters come over HTTP from {scheme}:// only when "
                    f"the server runs with --lora-remote {scheme}",
                    field,
                )
        if not self._rules.roots:
            raise no_adapter(
                f"{field}: local folders are loaded over HTTP only when the server runs with --lora-root PATH, the "
                "folder below which they lie",
                field,
            )
        try:
            folder = self._rules.check(local_path(source), field)
        except AdapterError as error:
            hint = "; as an id of the hub it needs --lora-remote hf" if is_hub_id(source) else ""
            raise no_adapter(f"{error.message}{hint}", field) from error
        return folder.path, folder


def _roots(config: ServerConfig) -> Iterator[str]:
    """Folders of the options, and those around the adapters of the start, which may be loaded again."""
    yield from config.lora_roots
    yield from config.lora_sources.directories
    for source in (*config.lora_modules.values(), *config.lora_draft_paths.values()):
        if source_scheme(source) in (None, *LOCAL_SCHEMES):
            path = os.path.abspath(local_path(source))
            yield path
            if os.path.dirname(path) != "/":  # which would be everything
                yield os.path.dirname(path)
