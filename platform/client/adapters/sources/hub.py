"""Adapters on the Hugging Face hub: "org/name", "org/name@revision", "hf://org/name"."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from ....core.adapter_files import ADAPTER_FILES, CONFIG_FILE, DRAFT_FOLDER
from .resolver import HUB_SCHEME, is_hub_id, no_adapter, shown_source, source_scheme, unavailable

_FILES = [*ADAPTER_FILES, "adapter_model.*", f"{DRAFT_FOLDER}/**"]
_TIMEOUT_SECONDS = 10.0


class HubResolver:
    """Downloads into the hub's own cache, and takes what is there when the hub cannot be reached."""

    def __init__(self, max_bytes: int, *, endpoint: str | None = None, cache_dir: str | None = None) -> None:
        """`max_bytes` of one adapter. `endpoint`, `cache_dir`: None for the hub library's own settings."""
        self._max_bytes = max_bytes
        self._endpoint = endpoint
        self._cache_dir = cache_dir

    def resolve(self, name: str, source: str | None) -> str | None:
        """See `AdapterResolver`."""
        if source is None or source_scheme(source) != HUB_SCHEME:
            return None
        repository = source.removeprefix(f"{HUB_SCHEME}://")
        if not is_hub_id(repository):
            raise no_adapter(f"{shown_source(source)!r} is no id of the hub: org/name, or org/name@revision")
        repository, _, revision = repository.partition("@")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

        try:
            self._check_size(source, repository, revision or None)
            folder = snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=_FILES,
                cache_dir=self._cache_dir,
                endpoint=self._endpoint,
                tqdm_class=_quiet_bar(),
            )
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise no_adapter(f"{shown_source(source)!r} cannot be had from the hub: {_first_line(error)}") from error
        except LocalEntryNotFoundError as error:  # not reached, and not in the cache
            raise unavailable(
                f"{shown_source(source)!r} is no local folder, not in the hub's cache, and the hub cannot be reached"
            ) from error
        return str(folder)

    def _check_size(self, source: str, repository: str, revision: str | None) -> None:
        """Raise AdapterError when it is too large or no adapter; do nothing when the hub cannot be asked."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            info = HfApi(endpoint=self._endpoint).model_info(
                repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except Exception:  # offline, in one of many ways: the download falls back to the cache, or says it
            return
        files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if CONFIG_FILE not in files:
            raise no_adapter(f"{shown_source(source)!r} has no {CONFIG_FILE}")
        size = sum(bytes_ for name, bytes_ in files.items() if any(fnmatch(name, pattern) for pattern in _FILES))
        if size > self._max_bytes:
            raise no_adapter(f"{shown_source(source)!r} has {size} bytes; at most {self._max_bytes} are taken")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _quiet_bar() -> Any:
    """A progress bar that shows nothing: a server's terminal is no place for one."""
    from tqdm.auto import tqdm

    class Quiet(tqdm):
        """A progress bar without output."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)  # the hub's own bars have one
            super().__init__(*arguments, **{**options, "disable": True})

    return Quiet
