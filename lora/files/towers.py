"""Adapters of multimodal models: their modules of vision towers and projectors are left out, as the towers are."""

from __future__ import annotations

from ...models.families.multimodal import is_of_tower
from .errors import adapter_error
from .tensor_file import TensorFile


def without_towers(file: TensorFile) -> tuple[TensorFile, tuple[str, ...]]:
    """View the tensors of a file that no vision tower has, and list the keys of the others.

    Raises:
        AdapterError: all are of a tower.
    """
    left_out = tuple(key for key in file.shapes if is_of_tower(key))
    if not left_out:
        return file, ()
    shapes = {key: shape for key, shape in file.shapes.items() if not is_of_tower(key)}
    if not shapes:
        raise adapter_error(
            f"all {len(left_out)} tensors are of a vision tower or its projector, such as {min(left_out)[:200]}; "
            "models are served without these"
        )
    return file._replace(shapes=shapes), left_out
