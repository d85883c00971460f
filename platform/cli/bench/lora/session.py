"""One measurement from options to a report: adapters, engines, both parts."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .....models.checkpoint.json_files import read_json
from .....models.checkpoint.loader import resolve_model_path
from .....models.config import DTYPES, config_from_hf, stored_dtype
from ....core.errors import InvalidRequestError, PromptTooLongError
from ....core.lora_request import LoRARequest
from ..machine import RANDOM_WEIGHTS, describe_machine, describe_model
from ..random_adapters import AdapterWriter, largest_rank
from . import cold, throughput
from .budget import Budget, BudgetSpent
from .cases import make_cases
from .engines import Engines, Workload
from .figures import rows
from .memory import reset_peak, resident_mib
from .report import labels

_BLOCK_SIZE = 16
_THROUGHPUTS_SHARE = 0.8
"""Share of the time for the throughputs when cold adapters are measured after them."""

Save = Callable[[dict[str, Any]], None]


class Session:
    """A measurement: its cases and options, and its results so far."""

    def __init__(self, options: argparse.Namespace, model: str, given: Mapping[str, str], scratch: Path) -> None:
        """Check the options against the model; see `measure_lora`."""
        self._options = options
        self._given = [LoRARequest(name, path=path) for name, path in given.items()]
        self._path = resolve_model_path(model)
        self._raw = read_json(self._path / "config.json")
        dtype = stored_dtype(self._raw) if options.dtype == "auto" else options.dtype
        self._shape = config_from_hf(self._raw, DTYPES[dtype])
        self._writer = AdapterWriter(scratch, self._shape, options.seed)
        self._mixes = self._make_mixes()
        self.cases = make_cases(options.batch_sizes, options.num_adapters, options.popularity, self._mixes)
        self._lora = self._lora_options()
        self._cells = throughput.empty_cells(self.cases)
        self._cold: cold.ColdMeasurement | None = None
        self._stopped_by: str | None = None
        self._facts: dict[str, Any] = {}
        self._memory: dict[str, Any] = {}
        self._budget = Budget(options.max_seconds)

    def _make_mixes(self) -> list[tuple[int, ...]]:
        most = max(self._options.num_adapters)
        if not self._given:
            return [tuple(mix) for mix in self._options.ranks]
        if most > len(self._given):
            raise InvalidRequestError(
                f"--num-adapters {most}: only {len(self._given)} are given with --lora", param="num_adapters"
            )
        return [tuple(sorted({largest_rank(Path(lora.path)) for lora in self._given}))]

    def _lora_options(self) -> dict[str, Any]:
        """Options of the engine with adapters. By default no request waits for a place for its adapter."""
        options = self._options
        max_loras = options.max_loras or max(8, min(max(options.batch_sizes), max(options.num_adapters)))
        ranks = [rank for mix in [*self._mixes, *map(tuple, options.ranks)] for rank in mix]
        values: dict[str, Any] = {
            "max_loras": max_loras,
            "max_cpu_loras": options.max_cpu_loras or max(32, 4 * max_loras),
            "max_lora_rank": max(ranks),
        }
        if options.lora_memory is not None:
            values["lora_memory"] = options.lora_memory
        return values

    # --- the engines ---

    def _engine_options(self) -> dict[str, Any]:
        """Options of both engines, with room for the largest batch and no more."""
        options, limit = self._options, self._shape.max_position_embeddings
        length = options.input_len + options.output_len
        if length > limit:
            raise PromptTooLongError(
                f"--input-len {options.input_len} and --output-len {options.output_len} exceed the model's {limit}",
                param="output_len",
            )
        seats, blocks = max(options.batch_sizes), max(options.batch_sizes) * _blocks(length)
        if options.cold_adapters:
            warm = options.input_len + self._warm_tokens
            length = max(length, warm, cold.STREAM_INPUT + cold.STREAM_OUTPUT)
            stream = cold.STREAM_SEATS * _blocks(cold.STREAM_INPUT + cold.STREAM_OUTPUT)
            blocks = max(blocks, options.warm_requests * _blocks(warm) + stream)
            seats = max(seats, options.warm_requests + cold.STREAM_SEATS)
        return {
            "model": str(self._path),
            "dtype": options.dtype,
            "device": options.device,
            "load_format": options.load_format,
            "seed": options.seed,
            "max_model_len": length,
            "max_num_seqs": seats,
            "block_size": _BLOCK_SIZE,
            "num_gpu_blocks_override": max(blocks, _blocks(length)),
            "enable_prefix_caching": False,
        }

    @property
    def _warm_tokens(self) -> int:
        return min(cold.WARM_TOKENS, self._shape.max_position_embeddings - self._options.input_len)

    def measure(self, save: Save) -> None:
        """Measure all that fits into the time; `save` gets the report after each part."""
        options = self._options
        workload = Workload(
            input_len=options.input_len,
            output_len=options.output_len,
            waves=options.waves,
            num_in_use=options.adapters_in_use,
            seed=options.seed,
            vocab_size=self._shape.vocab_size,
        )
        self._memory["start"] = resident_mib()
        try:
            with contextlib.ExitStack() as stack:
                engines = Engines(self._engine_options(), self._lora, workload)
                stack.callback(engines.shutdown)
                self._facts["model"] = describe_model(engines.serving.info, self._path)
                self._memory["engines loaded"] = resident_mib()
                reset_peak()
                self._register(engines)
                self._memory["adapters registered"] = resident_mib()
                self._measure_parts(engines, save)
        except BudgetSpent:
            self._stopped_by = "max_seconds"
        except KeyboardInterrupt:
            self._stopped_by = "interrupt"

    def _register(self, engines: Engines) -> None:
        """Register all adapters of every mix, and at least one for the second part."""
        most = max([*self._options.num_adapters, min(1, self._options.cold_adapters)])
        jobs = [(mix, index) for mix in self._mixes for index in range(most)]
        seconds = 0.0
        for mix, index in tqdm(jobs, desc="Registering adapters", file=sys.stderr, leave=False):
            self._budget.check()
            if self._given:
                lora = self._given[index]
            else:
                rank = mix[index % len(mix)]
                lora = self._writer.write(f"mix-{self._mixes.index(mix)}-{index}-rank-{rank}", rank)
            started = time.perf_counter()
            engines.register(mix, lora)
            seconds += time.perf_counter() - started
        self._facts["adapters"] = {"registered": len(jobs), "seconds_to_register": round(seconds, 3)}

    def _measure_parts(self, engines: Engines, save: Save) -> None:
        options, rounds = self._options, self._options.rounds

        def note() -> None:
            self._memory["measured"] = resident_mib()
            self._facts["adapters"] |= engines.facts()
            save(self.report())

        cold_rounds = rounds if options.cold_adapters else 0
        total = throughput.num_runs(self.cases, rounds) + len(cold.KINDS) * cold_rounds
        with tqdm(total=total, desc="Measuring", unit="run", file=sys.stderr, leave=False) as progress:
            try:
                budget = self._budget.share(_THROUGHPUTS_SHARE if cold_rounds else 1.0)
                throughput.warm_up(engines, self.cases, self._lora["max_cpu_loras"], budget, progress)
                throughput.measure(engines, self._cells, rounds, budget, progress, note)
            except BudgetSpent:
                self._stopped_by = "max_seconds"
            if cold_rounds:
                self._cold = cold.ColdMeasurement(engines, self._cold_plan(engines))
                try:
                    self._cold.measure(rounds, self._budget, progress, note)
                except BudgetSpent:
                    self._stopped_by = "max_seconds"
            note()

    def _cold_plan(self, engines: Engines) -> cold.ColdPlan:
        """Plan of the second part. Warm requests use at most half of the places for adapters, the stream the others."""
        options, mix = self._options, self._mixes[0]
        ranks: Sequence[int] = options.ranks[0]
        return cold.ColdPlan(
            cold=[
                self._writer.write(f"cold-{index}-rank-{ranks[index % len(ranks)]}", ranks[index % len(ranks)])
                for index in range(options.cold_adapters)
            ],
            warm=engines.adapters[mix][: max(1, min(options.warm_requests, self._lora["max_loras"] // 2))],
            num_warm=options.warm_requests,
            warm_tokens=self._warm_tokens,
            rate=options.cold_rate,
        )

    # --- the result ---

    def report(self) -> dict[str, Any]:
        """Report of the results so far."""
        options = self._options
        found_rows = rows(self._cells)
        cold_part = self._cold.report() if self._cold is not None else None
        complete = all(len(self._cells[case].runs) == options.rounds for case in self.cases)
        if options.cold_adapters:
            complete &= self._cold is not None and len(self._cold.runs[cold.COLD]) == options.rounds
        names = ("input_len", "output_len", "waves", "rounds", "seed", "adapters_in_use", "max_seconds")
        return {
            "labels": labels(
                random_weights=options.load_format == "dummy" or bool(self._raw.get(RANDOM_WEIGHTS)),
                random_adapters=not self._given or bool(options.cold_adapters),
                stopped_by=None if complete else self._stopped_by or "not finished yet",
            ),
            "complete": complete,
            "stopped_by": self._stopped_by,
            "machine": describe_machine(),
            "model": self._facts.get("model", {}),
            "settings": {name: getattr(options, name) for name in names} | self._lora,
            "adapters": self._facts.get("adapters", {}),
            "memory_mib": dict(self._memory),
            "rows": found_rows,
            "cold": cold_part,
        }


def measure_lora(
    options: argparse.Namespace, model: str, given: Mapping[str, str], scratch: Path, save: Save
) -> dict[str, Any]:
    """Measure with the options of the command. A second interrupt ends the measurement without a result.

    Args:
        given: name -> folder of adapters to use instead of random ones.
        scratch: an empty folder for random adapters.
        save: called with the report so far, after each part.

    Raises:
        OutriderError: whatever is wrong with options, model or adapters.
    """
    session = Session(options, model, given, scratch)
    session.measure(save)
    return session.report()


def _blocks(length: int) -> int:
    return -(-(length + 1) // _BLOCK_SIZE) + 1
