"""Distance of the Gumbel noise from rounding boundaries, over all values of v; takes half a minute.

`outrider.kernels.noise` rounds float64 logarithms, times NUDGE, to float32. This prints, for E and for G, the smallest
distance between that product and the middle of two neighbouring float32, in units in the last place of a float64, and
the hashes nearest to one. A logarithm whose error is below the distance (less one half, for the product's own
rounding) gives the same bits as any other such logarithm. Exit status 1 when that leaves less than five units.

Usage: python tools/noise_rounding.py
"""

import sys
from collections.abc import Iterator

import numpy as np

from outrider.kernels.noise.torch import NUDGE

CHUNK = 1 << 20
WANTED = 5.0
MIDDLE, PERIOD = 1 << 28, 1 << 29  # a float64 has 29 bits more than a float32


def hashes() -> Iterator[np.ndarray]:
    """All h up to 2^24, some of which share a v, then those that a float32 can hold: together they give every v."""
    for start in range(0, 1 << 24, CHUNK):
        yield np.arange(start, start + CHUNK, dtype=np.float64)
    for exponent in range(24, 32):
        step = 2 ** (exponent - 23)
        for start in range(1 << exponent, 1 << (exponent + 1), CHUNK * step):
            yield np.arange(start, start + CHUNK * step, step, dtype=np.float64)


def to_middle(values: np.ndarray) -> np.ndarray:
    """Distance of positive long doubles to the nearest middle of two float32, in units of a float64's last place."""
    mantissa, _ = np.frexp(values)
    units = np.ldexp(mantissa, 53)
    return np.abs(np.fmod(units, PERIOD) - MIDDLE).astype(np.float64)


def main() -> int:
    """Print both distances."""
    if np.finfo(np.longdouble).nmant < 63:
        print("needs a long double that is more exact than a double")
        return 2
    nudge = np.longdouble(NUDGE)
    nearest: dict[str, list[tuple[float, int]]] = {"E": [], "G": []}
    count = 0
    for h in hashes():
        count += len(h)
        v = np.minimum((h.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1.0 - 2.0**-24))
        exponential = -np.log1p(-v.astype(np.longdouble)) * nudge
        noise = np.log(exponential.astype(np.float32).astype(np.longdouble)) * nudge
        for name, values in (("E", exponential), ("G", np.abs(noise))):
            distances = to_middle(values)
            for at in np.argsort(distances)[:4]:
                nearest[name].append((round(float(distances[at]), 2), int(h[at])))
    print(f"{count} hashes")
    for name, found in nearest.items():
        print(name, ", ".join(f"{distance} (h = {h})" for distance, h in sorted(found)[:4]))
    return int(min(min(found)[0] for found in nearest.values()) - 0.5 < WANTED)


if __name__ == "__main__":
    sys.exit(main())
