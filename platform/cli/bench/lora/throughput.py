"""Part one: the requests of every case in rounds, each beside equal requests in an engine without adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .budget import Budget
from .cases import Case, groups
from .engines import Engines
from .figures import Cell

GROUP = 4
"""Number of cases that share one run of the base engine. With more, a case is further in time from the run that it is
compared with, on a machine whose speed changes by the minute."""

Cells = dict[Case, Cell]


def empty_cells(cases: Sequence[Case]) -> Cells:
    """Empty cells, at each batch size that of the base engine first."""
    cells: Cells = {}
    for case in cases:
        for member in (Case(case.batch_size, None), case):
            cells.setdefault(member, Cell(member))
    return cells


def num_runs(cases: Sequence[Case], rounds: int) -> int:
    """Number of runs of `measure`, the warm-up included."""
    return (len(cases) + len(list(groups(cases, GROUP)))) * (rounds + 1)


def warm_up(engines: Engines, cases: Sequence[Case], num_kept: int, budget: Budget, progress: Any) -> None:
    """Run every case once, briefly, after loading as many of the adapters in use as memory keeps.

    Args:
        num_kept: adapters that fit into host memory.

    Raises:
        BudgetSpent: the time is up.
    """
    largest = max(case.batch_size for case in cases)
    for ranks in dict.fromkeys(case.ranks for case in cases if case.num_adapters):
        most = max(case.num_adapters or 0 for case in cases if case.ranks == ranks)
        used = engines.workload.used(most)
        engines.load(engines.adapters[ranks][: min(used, num_kept)], largest, budget)
    for group in groups(cases, GROUP):
        for case in (Case(group[0].batch_size, None), *group):
            budget.check()
            engines.run(case, 0, warm_up=True)
            progress.update()


def measure(
    engines: Engines, cells: Cells, rounds: int, budget: Budget, progress: Any, after_group: Callable[[], None]
) -> None:
    """Fill the cells. A round is all cases once. Within a group each round begins with another member, so that whatever
    disturbs the machine for a while disturbs all alike.

    Args:
        after_group: called when a group has been measured.

    Raises:
        BudgetSpent: the time is up; the results so far are in the cells.
    """
    cases = [case for case in cells if case.num_adapters is not None]
    for number in range(rounds):
        for group in groups(cases, GROUP):
            _measure_group(engines, cells, group, number, budget, progress)
            after_group()


def _measure_group(
    engines: Engines, cells: Cells, group: Sequence[Case], number: int, budget: Budget, progress: Any
) -> None:
    base = Case(group[0].batch_size, None)
    members = [base, *group]
    done = {}
    for index in range(len(members)):
        budget.check()
        case = members[(index + number) % len(members)]
        done[case] = engines.run(case, number)
        progress.update()
    own = cells[base].runs
    own[len(own)] = done[base]  # measured beside every group, so more often than a round
    for case in group:
        cells[case].runs[number] = done[case]
        cells[case].bases[number] = done[base]
