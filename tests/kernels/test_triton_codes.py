"""Instructions that make numbers of codes, carried out one by one: the interpreter of Triton does without them."""

import re
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.quantized_linear import triton_codes


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [2] float64 that a register holds."""
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(dtype).double()


def permuted(low: int, high: int, selector: int) -> int:
    both = low | high << 32
    return sum((both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4))


def multiplied(x: int, y: int, z: int, dtype: torch.dtype) -> int:
    low, high = (halves(x, dtype) * halves(y, dtype) + halves(z, dtype)).to(dtype).view(torch.uint16).tolist()
    return low | high << 16


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda x: x,
    "and.b32": lambda x, y: x & y,
    "shr.b32": lambda x, y: x >> y,
    "prmt.b32": permuted,
    "lop3.b32": lambda x, y, z, table: x & y | z if table == 0xEA else pytest.fail("another table"),
    "fma.rn.bf16x2": lambda x, y, z: multiplied(x, y, z, torch.bfloat16),
    "fma.rn.f16x2": lambda x, y, z: multiplied(x, y, z, torch.float16),
}


def numbers(code: str, codes: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [4] of 4 bytes of codes, when the first result has the register of the codes."""
    registers = {"$0": codes}
    for line in filter(None, map(str.strip, re.sub(r"[{}]|\.reg[^;]*;", "", code).replace("$2", "$0").split(";"))):
        name, rest = line.split(None, 1)
        target, *operands = (operand.strip() for operand in rest.split(","))
        values = [registers[each] if each in registers else int(each, 0) for each in operands]
        registers[target] = INSTRUCTIONS[name](*values)
    return torch.cat([halves(registers[name], dtype) for name in ("$0", "$1")])


def words() -> Iterator[tuple[list[int], int]]:
    """Every byte, in each of the four places."""
    for i in range(256):
        each = [i, i ^ 0x5A, 255 - i, i * 7 % 256]
        yield each, int.from_bytes(bytes(each), "little")


@pytest.mark.parametrize("zero", [0, 8])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_of_4_bits(dtype: torch.dtype, half: int, zero: int) -> None:
    code = triton_codes._NIBBLES.value[4 * (dtype == torch.bfloat16) + 2 * half + (zero == 8)]
    for each, word in words():
        assert numbers(code, word, dtype).tolist() == [(byte >> 4 * half & 15) - zero for byte in each]


def test_numbers_of_float8() -> None:
    """The codes of NaN are numbers, as plain operations make them."""
    for each, word in words():
        expected = torch.tensor(each, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        actual = numbers(triton_codes._FLOAT8.value, word, torch.bfloat16)
        assert torch.equal(actual.signbit(), expected.signbit())
        assert torch.equal(actual.abs(), expected.abs().nan_to_num(480.0))
