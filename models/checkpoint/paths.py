"""Paths of the files of a model and of its tokenizer. Free of torch: the server's process asks it too."""

from __future__ import annotations

from pathlib import Path

from ...platform.core.config import EngineArgs
from ...platform.core.errors import NotFoundError
from .gguf_file import is_gguf

_MAX_SHOWN = 200
_PICKLES = ["pytorch_model*.bin"]
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
# Files of draft heads, which are often published as pickles of tensors.
_HUB_FILES_OF_DRAFTS = ["*.json", "*.safetensors", "*.bin", "*.pt"]


def resolve_model_path(
    name_or_path: str | Path, *, draft: bool = False, revision: str | None = None, cache_dir: str | None = None
) -> Path:
    """Folder of a model: a local directory itself, or a hub id, downloaded or found in the hub's cache. Or a GGUF file.

    Args:
        draft: the files are a draft head's.
        revision: branch, tag or commit of the hub id.
        cache_dir: the hub's cache; None: its library's own.

    Raises:
        NotFoundError: it is neither.
    """
    name = str(name_or_path)
    try:
        local = Path(name_or_path).expanduser()
        if local.is_dir() or (not draft and is_gguf(local) and local.is_file()):
            return local
        exists = local.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; "~nobody"
        reason = getattr(error, "strerror", None) or str(error)
        raise NotFoundError(f"model {name[:_MAX_SHOWN]!r}: {reason}", param="model") from error
    if exists or name.count("/") > 1 or name.startswith((".", "/", "~")):
        what = "file" if is_gguf(name) else "directory"
        raise NotFoundError(f"model {name!r}: there is no such {what}", param="model")
    from huggingface_hub import snapshot_download

    patterns = _HUB_FILES_OF_DRAFTS if draft else _HUB_FILES
    folder = None if cache_dir is None else Path(cache_dir).expanduser()
    try:
        path = Path(snapshot_download(name, revision=revision, cache_dir=folder, allow_patterns=patterns))
        if not draft and not any(path.glob("*.safetensors")):
            snapshot_download(name, revision=revision, cache_dir=folder, allow_patterns=_PICKLES)
        return path
    except Exception as error:  # the hub's errors have no common base, and its HTTP library's come through
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        at = "" if revision is None else f" at revision {revision[:_MAX_SHOWN]!r}"
        raise NotFoundError(
            f"model {name!r}{at} is neither a local directory nor a model that could be had from the hub: {reason}",
            param="model",
        ) from error


def tokenizer_path(args: EngineArgs, model: str | Path) -> Path:
    """Folder or file of the tokenizer, for the model that was found at `model`. The model's tokenizer has the model's
    revision unless `tokenizer_revision` is given.

    Raises:
        NotFoundError: there is none.
    """
    name = args.tokenizer if args.tokenizer is not None else args.model
    if name is None or (args.tokenizer is None and args.tokenizer_revision in (None, args.revision)):
        return Path(model)
    if Path(name).is_dir() or is_gguf(name):
        return Path(name)
    return resolve_model_path(name, revision=args.tokenizer_revision, cache_dir=args.download_dir)
