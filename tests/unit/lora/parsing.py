"""Adapters as they are read for models given by their modules' shapes, with their weights by module."""

from pathlib import Path
from typing import NamedTuple

import torch

from outrider.lora.adapter import Adapter, AdapterSource
from outrider.lora.device.layout import LM_HEAD, ModelLayout, RowLayout
from outrider.lora.files.folder import AdapterFiles
from outrider.lora.files.tensor_keys import ModelModules
from outrider.models.layers.embedding import EMBEDDING


class DraftTarget(NamedTuple):
    method: str
    modules: dict


class Parsed:
    """An adapter and its weights by module."""

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self.digest, self.rows, self.draft, self.rank = adapter.digest, adapter.rows, adapter.draft, adapter.target.rank
        self.modules, self.draft_modules = adapter.target.modules(), adapter.drafter.modules()


def make_model(shapes, dtype=torch.float32):
    layout = ModelLayout(RowLayout(dtype), RowLayout(dtype))
    for name, shape in shapes.items():
        part = layout.vocabulary if name in (EMBEDDING, LM_HEAD) else layout.linears
        part.reserve([name], shape.in_features, [shape.out_features])
    return ModelModules(dict(shapes), layout)


def parse(path, known, *, max_rank, dtype, draft=None, draft_path=None):
    """Read a folder for a model with `known` modules, and the draft weights for a `DraftTarget`."""
    method, draft_modules = draft or ("", {})
    target, drafter = make_model(known, dtype), make_model(draft_modules, dtype)
    files = AdapterFiles(target, drafter, draft_method=method, max_rank=max_rank)
    return Parsed(files.read(AdapterSource(str(Path(path)), draft_path if draft else None)))
