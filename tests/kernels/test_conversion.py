"""Matrices from a file's dtype to the served one, and side by side into rows: the kernel against the reference."""

import pytest
import torch

from outrider.kernels.conversion import Matrix, StoredGroups, StoredMatrix, convert, native, place
from outrider.kernels.conversion import torch as reference
from outrider.kernels.native import library

SHAPES = ((1, 1), (8, 16), (16, 8), (48, 8), (37, 8), (37, 13), (50, 33), (16, 70), (5, 64))
SERVED = (torch.float32, torch.bfloat16)
STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def kernels():
    if library() is None:
        pytest.skip("no compiler")


def matrices(dtype):
    """Matrices of all shapes, as they are and transposed; subnormal numbers among them."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for shape in SHAPES:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values.view(-1)[::3] *= 1e-39
        found += [Matrix(values.to(dtype)), Matrix(values.flip(0).to(dtype), True, 1.7)]
    return found


def empty(given, dtype):
    return torch.full((sum(matrix.values.numel() for matrix in given),), 7.0, dtype=dtype)


def converted(implementation, given, dtype):
    out = empty(given, dtype)
    return implementation(out, given), out.view(torch.uint8)


@pytest.mark.parametrize("served", SERVED, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_the_kernel_gives_the_references_bits(stored, served):
    given = matrices(stored)
    assert native.serves(empty(given, served))
    (good, got), (well, expected) = (converted(part.convert, given, served) for part in (native, reference))
    assert good
    assert well
    assert torch.equal(got, expected)


@pytest.mark.parametrize("served", SERVED, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("index", range(2 * len(SHAPES)))
def test_infinity_and_nan_are_reported(index, bad, served):
    given = matrices(torch.float32)
    given[index].values.view(-1)[-1] = bad
    assert not converted(native.convert, given, served)[0]
    assert not converted(reference.convert, given, served)[0]


@pytest.mark.parametrize("implementation", [native, reference], ids=["native", "reference"])
def test_overflow_check_ignores_sums_of_finite_values(implementation):
    large = Matrix(torch.tensor([[3.4e38] * 4]))
    assert not converted(implementation.convert, [large], torch.bfloat16)[0]
    assert not converted(implementation.convert, [large._replace(scale=2.0)], torch.float32)[0]
    assert converted(implementation.convert, [large], torch.float32)[0]


@pytest.mark.parametrize("dtype", [*SERVED, torch.float16], ids=str)
def test_parts_come_to_their_columns(dtype):
    parts = [(3, torch.randn(4, 5).to(dtype)), (8, torch.randn(2, 1).to(dtype)), (10, torch.randn(4, 6).to(dtype))]
    out, expected = torch.zeros(4, 20, dtype=dtype), torch.zeros(4, 20, dtype=dtype)
    place(out, parts)
    reference.place(expected, parts)
    assert torch.equal(out, expected)
    assert out.count_nonzero() == 4 * 5 + 2 + 4 * 6


def test_float16_is_served_by_the_reference():
    given = matrices(torch.float32)
    assert not native.serves(empty(given, torch.float16))
    assert converted(convert, given, torch.float16)[0]


@pytest.mark.parametrize("served", SERVED, ids=str)
@pytest.mark.parametrize("stored", SERVED, ids=str)
def test_groups_of_a_files_bytes_come_to_their_columns(stored, served):
    """Out of order, with something else between them; what `convert` and `place` make of the same."""
    generator = torch.Generator().manual_seed(6)
    given = [
        [Matrix(torch.randn(4, 37, generator=generator)), Matrix(torch.randn(33, 4, generator=generator), True, 1.7)],
        [Matrix(torch.randn(40, 2, generator=generator), True, 0.3), Matrix(torch.randn(3, 5, generator=generator))],
    ]
    given = [[matrix._replace(values=matrix.values.to(stored)) for matrix in group] for group in given]
    width, column, contents, groups = 130, 3, [], []
    expected, rows = torch.zeros(2, 4, width, dtype=served).unbind()
    for group in given:
        content, found = b"something", []
        content += bytes(-len(content) % 4)
        for matrix in reversed(group):
            rank, size = matrix.values.shape[:: -1 if matrix.transposed else 1]
            found.insert(0, StoredMatrix(len(content), *matrix.values.shape, stored, matrix.transposed, column))
            content += matrix.values.view(torch.uint8).numpy().tobytes()
            place(
                expected,
                [
                    (
                        column,
                        matrix.scaled().to(served).view(matrix.values.shape).t().contiguous()
                        if matrix.transposed
                        else matrix.scaled().to(served),
                    )
                ],
            )
            column += size
            assert rank <= 4
        contents.append(content)
        groups.append(found)
    plan = StoredGroups(groups, served, (4, width))
    conversion = plan.start([matrix.scale for group in given for matrix in group], rows)
    for index, (content, group) in enumerate(zip(contents, given, strict=True)):
        conversion.buffer(index)[:] = content
        assert conversion.convert(index)
        _, result = converted(native.convert, group, served)
        assert bytes(conversion.result(index)) == result.numpy().tobytes()
        conversion.place(index)
    assert torch.equal(rows, expected)
    conversion.buffer(0)[-2:] = b"\xff\xff"
    conversion.buffer(0)[-4:-2] = b"\xff\xff"
    assert not conversion.convert(0), "not finite"
