"""Hashes whose noise is the hardest to round, and keys that make any hash."""

HARD_HASHES = (9357507, 9357508, 32439530, 50358928, 61992608, 53748912, 83991168, 661261888)
"""Nearest to a rounding boundary of all (`tools/noise_rounding.py`); the first four: nearest without the nudge."""

MASK32 = (1 << 32) - 1


def key_of_hash(h: int) -> int:
    """The row key (of 64 bits, the upper half zero) under which token 0 has this hash: lowbias32 backwards."""
    x = h ^ (h >> 16)
    x = x * pow(0x846CA68B, -1, 1 << 32) & MASK32
    x ^= (x >> 15) ^ (x >> 30)
    x = x * pow(0x7FEB352D, -1, 1 << 32) & MASK32
    return x ^ (x >> 16)
