"""New weights for the target and for the drafter of a running engine, which are checked before anything changes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ...lora.manager import AdapterManager
from ...models.checkpoint.loader import ModelOptions
from ...models.checkpoint.paths import resolve_model_path
from ...models.checkpoint.weight_files import misfits
from ...models.checkpoint.weight_update import PARAM, WeightUpdate
from ...models.config import DecoderConfig
from ...models.model import LanguageModel
from ...models.weight_copy import copy_weights
from ...spec_decode.drafters.base import Drafter
from ...spec_decode.drafters.dflash.config import MASK_EMBEDDING
from ..core.config import EngineConfig
from ..core.errors import EngineDeadError, InvalidRequestError, OutriderError, error_from_info, invalid
from ..core.speculative_config import SpeculativeConfig
from ..core.weight_source import WeightSource
from .features import NoAdapters

if TYPE_CHECKING:
    from .executor.parallel import ParallelExecutor

_HEADER_BYTES = 100 << 20
"""Longest header of a safetensors file, which its library takes."""
_WIDEST = 8
"""Bytes of an element of the widest dtype that is read."""


class WeightParts(NamedTuple):
    """Parts of an engine whose weights may be replaced, and what they were made of."""

    config: EngineConfig
    path: Path
    """Folder or file of the target."""
    model: LanguageModel
    drafter: Drafter
    make_drafter: Callable[[SpeculativeConfig], Drafter]
    """Function that makes the drafter of another configuration for this target."""
    adapters: AdapterManager | NoAdapters
    parallel: ParallelExecutor | None
    """The other ranks; None: there are none."""


class Weights:
    """The weights of one engine."""

    def __init__(self, parts: WeightParts) -> None:
        self._parts = parts
        self.failure: EngineDeadError | None = None
        """Error of a replacement that failed in the middle: the engine cannot continue."""

    def update(self, sources: Sequence[WeightSource], *, draft: bool) -> bool:
        """Replace weights of the target, or with `draft` those of the drafter. Nothing of a sequence may be in flight.

        Returns:
            False if the target keeps some of its weights.

        Raises:
            InvalidRequestError: they are not those of such a model; a tensor is named. Or drafts learn. Nothing has
            changed.
            InvalidUserInputError: an adapter in use depends on the weights. NotFoundError: files are missing.
        """
        if not sources:
            raise invalid(PARAM, "or shared_memory must be given")
        config = self._parts.config
        if config.speculative is not None and config.speculative.learn is not None:
            message = (
                "weights are not replaced while drafts learn (learn in speculative_config): they learn for the old"
            )
            raise InvalidRequestError(message, param=PARAM)
        return self._update_drafter(sources) if draft else self._update_target(sources)

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Let an error in the middle of a replacement end the engine: some weights are new, and others old."""
        try:
            yield
        except BaseException as error:
            self.failure = EngineDeadError(f"the weights could not be replaced, and are no longer whole: {error}")
            raise self.failure from error

    def _update_target(self, sources: Sequence[WeightSource]) -> bool:
        parts, served = self._parts, self._parts.model.config
        if parts.model.device.type == "cuda" and isinstance(served, DecoderConfig) and served.varied is not None:
            raise InvalidRequestError(
                f"the weights of {served.architecture} are replaced on a CPU alone: captured graphs hold some of them",
                param=PARAM,
            )
        largest = _WIDEST * parts.model.num_parameters + _HEADER_BYTES
        files = [Path(source.locate(largest)) for source in sources]
        ranks = None if parts.parallel is None else parts.parallel.ranks
        options = ModelOptions(parts.config.model_impl, parts.config.quantization, ranks)

        def check() -> WeightUpdate:
            found = WeightUpdate(parts.model, parts.path, files, options)
            parts.adapters.check_base_may_change()
            return found

        if parts.parallel is not None:
            return parts.parallel.update_weights(files, check).is_whole
        found = check()
        with self._replacing():
            found.apply()
        return found.is_whole

    def _update_drafter(self, sources: Sequence[WeightSource]) -> bool:
        parts, config = self._parts, self._parts.config.speculative
        held = parts.drafter.weights
        if config is None or not held:
            what = "there is no drafter" if config is None else f"the method {config.method} has no weights of its own"
            raise InvalidRequestError(f"{what}: see speculative_config", param=PARAM)
        if len(sources) != 1:
            raise invalid(PARAM, "must be one folder or file for the drafter")
        old = resolve_model_path(
            config.model or str(parts.path),
            draft=config.method != "draft_model",
            revision=config.revision,
            cache_dir=config.download_dir,
        )
        largest = _WIDEST * parts.model.num_parameters + _HEADER_BYTES
        try:
            with _as_folder(Path(sources[0].locate(largest)), old) as folder:
                fresh = parts.make_drafter(replace(config, model=str(folder), revision=None))
                for new, other in zip(fresh.weights, held, strict=True):
                    check_shapes(new, other)
                with self._replacing():
                    for new, other in zip(fresh.weights, held, strict=True):
                        copy_weights(new, other)
        except EngineDeadError:
            raise
        except OutriderError as error:
            raise error_from_info(replace(error.info(), param=PARAM)) from error
        return True


def check_shapes(new: Any, held: Any) -> None:
    """Check that the weights of a new drafter have the tensors of those in use.

    Raises:
        InvalidRequestError: a tensor is missing, unexpected or of another shape.
    """
    shapes = {name: slot.shape for name, slot in new.weight_slots().items()}
    problems = misfits(held.weight_slots(), shapes)
    # Weights in files of their own, such as mask_embedding.pt; names of what is computed from weights begin with "_".
    for name, value in vars(held).items():
        if isinstance(value, Tensor) and not name.startswith("_") and getattr(new, name) is None:
            problems = problems or f"missing: {name}"
    if problems:
        raise invalid(PARAM, f"is of another drafter than the one in use; {problems}")


@contextmanager
def _as_folder(source: Path, old: Path) -> Iterator[Path]:
    """The folder of a drafter: `source`, or for a file of tensors one with it and the other files of `old`."""
    if source.is_dir() or not old.is_dir():
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="outrider-weights-") as name:
        folder = Path(name)
        for file in old.iterdir():
            is_weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json")
            if not is_weights or file.name == MASK_EMBEDDING:
                (folder / file.name).symlink_to(file.resolve())
        (folder / "model.safetensors").symlink_to(source.resolve())
        yield folder
