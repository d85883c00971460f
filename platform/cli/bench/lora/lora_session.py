"""One measurement of adapters from options to a report: adapters, engines, both parts."""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .....models.checkpoint.json_files import read_model_config
from .....models.checkpoint.paths import resolve_model_path
from .....models.config import DTYPES, config_from_hf, stored_dtype
from .....models.demo import demo_model_path
from ....core.errors import InvalidRequestError, PromptTooLongError
from ....core.lora_request import LoRARequest
from ...adapter_rank import largest_rank
from ..bench_options import is_demo
from ..engine_runs import BLOCK_SIZE, num_blocks
from ..machine import RANDOM_WEIGHTS, describe_machine, describe_model, labels
from ..random_adapters import AdapterWriter
from ..request_figures import Round
from . import cold_adapters
from .cases import Case, make_cases, rows
from .cold_adapters import KINDS, ColdPlan, ColdRun, cold_figures, run_with_stream
from .lora_engines import Engines, Workload

_RESIDENT_UNIT = 2**20 if sys.platform == "darwin" else 2**10
"""Units of `ru_maxrss` in a MiB."""


def _peak_mib() -> float:
    """Most resident memory of this process so far."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _RESIDENT_UNIT, 1)


class Session:
    """One measurement: its cases and sizes, derived from the options and the model.

    Raises:
        OutriderError: whatever is wrong with options, model or adapters; also from `measure`.
    """

    def __init__(self, options: argparse.Namespace, given: Mapping[str, str], scratch: Path) -> None:
        """`given` has the folders by name of adapters to use instead of random ones, which are written to `scratch`."""
        self._options = options
        self._given = [LoRARequest(name, path=path) for name, path in given.items()]
        self._path = demo_model_path() if is_demo(options.model) else resolve_model_path(options.model)
        self._raw = read_model_config(self._path)
        dtype = stored_dtype(self._raw) if options.dtype == "auto" else options.dtype
        self._shape = config_from_hf(self._raw, DTYPES[dtype])
        self._writer = AdapterWriter(scratch, self._shape, options.seed)
        most = max(options.num_adapters)
        if given and most > len(given):
            raise InvalidRequestError(f"{most}: only {len(given)} are given with --lora", param="num_adapters")
        self._ranks = sorted({largest_rank(Path(path)) for path in given.values()}) or options.ranks
        self._cases = make_cases(options.batch_sizes, options.num_adapters, options.popularity)
        self._lora = self._lora_options()
        self._warm_tokens = min(cold_adapters.WARM_TOKENS, self._shape.max_position_embeddings - options.input_len)

    def _lora_options(self) -> dict[str, Any]:
        """Options of the engine with adapters. By default no request waits for a slot for its adapter."""
        options = self._options
        max_loras = options.max_loras or max(8, min(max(options.batch_sizes), max(options.num_adapters)))
        return {
            "max_loras": max_loras,
            "max_cpu_loras": options.max_cpu_loras or max(32, 4 * max_loras),
            "max_lora_rank": max(*self._ranks, *options.ranks),
            "lora_memory": options.lora_memory,
        }

    def _engine_options(self) -> dict[str, Any]:
        """Options of both engines, with room for the largest batch and no more."""
        options, limit = self._options, self._shape.max_position_embeddings
        length = options.input_len + options.output_len
        if length > limit:
            raise PromptTooLongError(
                f"--input-len {options.input_len} and --output-len {options.output_len} exceed the model's {limit}",
                param="output_len",
            )
        seats, blocks = max(options.batch_sizes), max(options.batch_sizes) * num_blocks(length)
        if options.cold_adapters:
            warm, short = (
                options.input_len + self._warm_tokens,
                cold_adapters.STREAM_INPUT + cold_adapters.STREAM_OUTPUT,
            )
            length = max(length, warm, short)
            stream = cold_adapters.STREAM_SEATS * num_blocks(short)
            blocks = max(blocks, options.warm_requests * num_blocks(warm) + stream)
            seats = max(seats, options.warm_requests + cold_adapters.STREAM_SEATS)
        return {
            "model": str(self._path),
            **{name: getattr(options, name) for name in ("dtype", "device", "quantization", "load_format", "seed")},
            "max_model_len": length,
            "max_num_seqs": seats,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": max(blocks, num_blocks(length)),
            "enable_prefix_caching": False,
        }

    def measure(self) -> dict[str, Any]:
        """Measure both parts; returns the report."""
        options = self._options
        workload = Workload(
            input_len=options.input_len,
            output_len=options.output_len,
            num_in_use=options.adapters_in_use,
            seed=options.seed,
            vocab_size=self._shape.vocab_size,
        )
        memory = {}
        with contextlib.ExitStack() as stack:
            engines = Engines(self._engine_options(), self._lora, workload)
            stack.callback(engines.shutdown)
            memory["engines loaded"] = _peak_mib()
            adapters = self._register(engines)
            memory["adapters registered"] = _peak_mib()
            rounds, cold = self._measure_parts(engines)
            memory["measured"] = _peak_mib()
            adapters["adapters_by_level"] = engines.adapters_by_level()
            model = describe_model(options.model, engines.serving.info)
        names = ("input_len", "output_len", "rounds", "seed", "adapters_in_use")
        return {
            "labels": self._labels(),
            "machine": describe_machine(),
            "model": model,
            "settings": {name: getattr(options, name) for name in names} | {"ranks": self._ranks} | self._lora,
            "adapters": adapters,
            "peak_memory_mib": memory,
            "rows": rows(rounds),
            "cold": cold,
        }

    def _labels(self) -> list[str]:
        random_weights = self._options.load_format == "dummy" or bool(self._raw.get(RANDOM_WEIGHTS))
        if not random_weights and (not self._given or self._options.cold_adapters):
            return ["RANDOM ADAPTERS: the text is meaningless"]
        return labels(random_weights=random_weights)

    def _register(self, engines: Engines) -> dict[str, Any]:
        """Register all adapters, at least one for the second part; returns their number and time."""
        count = max([*self._options.num_adapters, min(1, self._options.cold_adapters)])
        seconds = 0.0
        for index in tqdm(range(count), desc="Registering adapters", file=sys.stderr, leave=False):
            lora = self._given[index] if self._given else self._write(f"adapter-{index}", index)
            started = time.perf_counter()
            engines.register(lora)
            seconds += time.perf_counter() - started
        return {"registered": count, "seconds_to_register": round(seconds, 3)}

    def _write(self, name: str, index: int) -> LoRARequest:
        ranks = self._options.ranks
        return self._writer.write(name, ranks[index % len(ranks)])

    def _measure_parts(self, engines: Engines) -> tuple[dict[Case, list[Round]], dict[str, Any] | None]:
        rounds = self._options.rounds
        # At each batch size the engine without adapters runs first.
        cells: dict[Case, list[Round]] = {c: [] for case in self._cases for c in (Case(case.batch_size, None), case)}
        cold_rounds = rounds if self._options.cold_adapters else 0
        total = len(cells) * (rounds + 1) + len(KINDS) * cold_rounds
        with tqdm(total=total, desc="Measuring", unit="run", file=sys.stderr, leave=False) as progress:
            self._warm_up(engines, list(cells), progress)
            for number in range(rounds):
                for case in _in_turn(list(cells), number):
                    cells[case].append(engines.run(case, number))
                    progress.update()
            return cells, self._measure_cold(engines, progress) if cold_rounds else None

    def _warm_up(self, engines: Engines, cases: Sequence[Case], progress: Any) -> None:
        """Run every case once, briefly, after loading as many of the adapters in use as host memory keeps."""
        largest = max(case.batch_size for case in cases)
        kept = min(engines.workload.used(max(self._options.num_adapters)), self._lora["max_cpu_loras"])
        engines.load(engines.adapters[:kept], largest)
        for case in cases:
            engines.run(case, 0, warm_up=True)
            progress.update()

    def _measure_cold(self, engines: Engines, progress: Any) -> dict[str, Any]:
        """Measure the second part. Warm requests use at most half of the slots for adapters, the stream the others."""
        options, warm = self._options, engines.adapters
        plan = ColdPlan(
            cold=[self._write(f"cold-{index}", index) for index in range(options.cold_adapters)],
            warm=warm[: max(1, min(options.warm_requests, self._lora["max_loras"] // 2))],
            num_warm=options.warm_requests,
            warm_tokens=self._warm_tokens,
            rate=options.cold_rate,
        )
        runs: dict[str, list[ColdRun]] = {kind: [] for kind in KINDS}
        for number in range(options.rounds):
            for kind in KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]:
                runs[kind].append(run_with_stream(engines, plan, kind, number))
                progress.update()
        return {
            "warm_requests": plan.num_warm,
            "warm_adapters": len(plan.warm),
            "cold_adapters": len(plan.cold),
            "cold_rate": plan.rate,
            **cold_figures(runs),
        }


def _in_turn(cases: Sequence[Case], number: int) -> list[Case]:
    """The cases by batch size. Each round begins with another case of a batch size, so that whatever disturbs the
    machine for a while disturbs all alike."""
    found = []
    for batch_size in dict.fromkeys(case.batch_size for case in cases):
        same = [case for case in cases if case.batch_size == batch_size]
        found += same[number % len(same) :] + same[: number % len(same)]
    return found
