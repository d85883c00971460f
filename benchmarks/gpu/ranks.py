"""Tensor parallelism in captured graphs, as far as one device shows it: a group of one rank. Its calls to NCCL are
captured; with one rank nothing is summed."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, distributed

from outrider.kernels.graphs import CudaGraphs
from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.checkpoint.loader import ModelOptions, load_model
from outrider.models.model import LanguageModel
from outrider.models.parallel import Ranks
from outrider.models.pass_graphs import PassGraphs
from outrider.models.pass_grid import PassLimits
from outrider.platform.engine.executor.captured import TargetPasses
from outrider.platform.engine.executor.collectives import ProcessRanks
from outrider.platform.engine.executor.launch import THIS_MACHINE
from outrider.spec_decode.drafters.base import no_adapters

from .load import synchronize
from .models import ModelShape
from .report import Context

ROWS = 4
ROUNDS = 20
_BLOCK = 16


def check_ranks(context: Context, root: Path, shape: ModelShape) -> None:
    """Check that a divided model's logits are the whole one's, also from a graph with calls to NCCL, and time it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    path, device = shape.write(root), context.device
    ranks = ProcessRanks(distributed.HashStore(), 0, 1, device, THIS_MACHINE)

    def load(ranks: Ranks | None) -> LanguageModel:
        return load_model(path, "float32", device, "dummy", options=ModelOptions("native", ranks=ranks))

    with torch.inference_mode():
        wanted = [_logits(load(None), _rows(seed)) for seed in range(2)]
        model = load(ranks)
        context.row("logits of a divided model", passed=_agree(_logits(model, _rows(0)), wanted[0]))
        if device != "cuda":
            context.skip("calls to NCCL in graphs", "they are a GPU's")
            return
        kv = allocate_kv(model.kv_layers, ROWS, _BLOCK, torch.float32, device)
        graphs = PassGraphs(CudaGraphs(torch.device(device)), PassLimits(ROWS, _BLOCK))
        passes = TargetPasses(graphs, model, kv, (no_adapters, no_adapters), ())
        for seed, right in enumerate(wanted):  # the second is a replay alone
            found = passes.run(_rows(seed), [(None, 1)] * ROWS, verifies=True)
            passed = found is not None and _agree(found[0][:ROWS], right)
            context.row(f"logits of a graph with calls to NCCL, {seed}", passed=passed, captured=graphs.num_captured)
        times = []
        for replays in (False, True):
            synchronize()
            started = time.perf_counter()
            for _ in range(ROUNDS):
                if replays:
                    passes.run(_rows(0), [(None, 1)] * ROWS, verifies=True)
                else:
                    model.compute_logits(model.forward(build_batch(_rows(0), model, kv)).hidden)
            synchronize()
            times.append((time.perf_counter() - started) / ROUNDS)
        context.row("pass of a divided model", eager_milliseconds=times[0] * 1e3, graph_milliseconds=times[1] * 1e3)


def _rows(seed: int) -> SequenceRows:
    """First tokens of some requests."""
    tokens = [(7 * row + 11 * seed) % 97 for row in range(ROWS)]
    return SequenceRows(tokens, [1] * ROWS, [0] * ROWS, [[row] for row in range(ROWS)])


def _logits(model: LanguageModel, rows: SequenceRows) -> Tensor:
    kv = allocate_kv(model.kv_layers, ROWS, _BLOCK, torch.float32, model.device)
    return model.compute_logits(model.forward(build_batch(rows, model, kv)).hidden)


def _agree(found: Tensor, right: Tensor) -> bool:
    return bool((found - right).abs().max() < 1e-4 * right.abs().max())
