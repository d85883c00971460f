"""The penalties' kernel and the CPU's path against the definitions, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.device_outcome import DeviceIds, OnDevice
from outrider.kernels.penalties import COUNT_BITS, Penalised
from outrider.kernels.penalties import torch as reference
from outrider.kernels.penalties import triton as kernel

VOCAB = 700


class Unasked(OnDevice):
    """The host must not wait for it."""

    def known(self):
        raise AssertionError("the host waited")


def entries(prompt, generated):
    tokens = list(dict.fromkeys([*prompt, *generated]))
    return np.array([token << COUNT_BITS | generated.count(token) for token in tokens], dtype=np.int64)


def definition(row, prompt, generated, repetition, presence, frequency):
    """In float32, one operation after the other."""
    r, p, f = (torch.tensor(x, dtype=torch.float32) for x in (repetition, presence, frequency))
    row = row.clone()
    for token in {*prompt, *generated}:
        row[token] = row[token] / r if row[token] > 0 else row[token] * r
        if token in generated:
            row[token] -= p + f * torch.tensor(float(generated.count(token)))
    return row


def make_case(num_prompt, num_generated, num_drafts, strengths, seed=0, late_source=None, first_place=0, step=1):
    """A sequence with a row after each of its drafts, the first of which is the token that is being sampled."""
    generator = torch.Generator().manual_seed(seed)
    prompt, generated, drafts = (
        torch.randint(0, 40 if count < 40 else VOCAB, (count,), generator=generator).tolist()
        for count in (num_prompt, num_generated, num_drafts)
    )
    places = [first_place + step * j for j in range(num_drafts + 1)]
    parts = [drafts[:1], drafts[1:]]
    if late_source is not None:
        source = late_source(drafts)
        parts = [DeviceIds(source, [j]) for j in range(num_drafts)]
    penalised = Penalised(places, range(num_drafts + 1), entries(prompt, generated), parts, *strengths)
    rows = [(prompt, [*generated, *drafts[:j]], *strengths) for j in range(num_drafts + 1)]
    return penalised, dict(zip(places, rows, strict=True))


CASES = [
    (5, 3, 0, (1.3, 0.5, 0.25)),
    (0, 0, 4, (1.0, 0.7, 0.3)),  # nothing but drafts, maybe equal ones
    (600, 90, 5, (0.8, -1.0, 0.1)),  # more entries than a block
    (1, 0, 0, (1.5, 0.0, 0.0)),
    (30, 500, 9, (1.0, 0.0, -0.3)),
    (60, 5, 70, (1.2, 0.4, 0.2)),  # more drafts than are compared at once
]


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_any_sequences_equal_the_definition(device, seed):
    """Together, in strided rows of larger logits; rows of others, and other tokens, stay bit for bit."""
    sequences, want_of, place = [], {}, 0
    for number, case in enumerate(CASES):
        penalised, rows = make_case(*case, seed=10 * seed + number, first_place=place, step=2)
        sequences.append(penalised)
        want_of |= rows
        place += 2 * len(rows) - number % 2
    logits = 3 * torch.randn(place + 3, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, 7], logits[:, 8], logits[:, 9] = -torch.inf, torch.inf, 0.0
    want = logits.clone()
    for at, row in want_of.items():
        want[at] = definition(want[at], *row)
    on_cpu, there = logits.clone(), logits.to(device)
    reference.penalise(on_cpu, sequences)
    kernel.penalise(there, sequences)
    assert torch.equal(on_cpu, want)
    assert torch.equal(there.cpu(), want)


def test_drafts_on_the_device_are_counted_there(device):
    def late(ids):
        return Unasked(torch.tensor(ids, dtype=torch.int64, device=device))

    cases = [
        make_case(*case, seed=number, first_place=100 * number, late_source=late)
        for number, case in enumerate(CASES[:3])
    ]
    logits = torch.randn(210, VOCAB)
    want = logits.clone()
    for _, rows in cases:
        for at, row in rows.items():
            want[at] = definition(want[at], *row)
    there = logits.to(device)
    kernel.penalise(there, [penalised for penalised, _ in cases])
    assert torch.equal(there.cpu(), want)
