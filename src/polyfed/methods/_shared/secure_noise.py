"""Gaussian noise that nobody can repeat, fast: AES-256 in counter mode under a key from the system's generator, made normal in double precision.

    out = g ( round(value / g) + round(noise / g) ),   g = 2^-30 of the spread, a power of two

What leaves is a sum of whole multiples of g, so the last bits of a float tell nothing about the value under the noise (Mironov, 2012; Jin et al., 2022):
every multiple of g can come of every value. Rounding the sum to the type of the value afterwards looks at no data. Rounding the value adds at most
g sqrt(d) to what one sample can change, d numbers: 4e-6 of the spread for 14 million, which the 0.05 % of epsilon that plans leave unspent covers
up to a noise multiplier of 60.

Not covered: the noise is made from numbers of 53 bits, so its probabilities are those of a Gaussian to about 2^-22 of themselves, and none is beyond 8.6 spreads
(one in 10^17 would be). Every number takes the same operations, without rejection; beyond that nothing is done about who can measure times.

References: Box and Muller, 1958; Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012; Jin et al., Are We There
Yet? Timing and Floating-Point Attacks on Differential Privacy Systems, S&P 2022; NIST SP 800-38A (counter mode).
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import MissingExtra

KEY_BYTES, BLOCK_BYTES, WORD_BYTES = 32, 16, 8
BITS = 53
GRID_BITS = 30
CHUNK = 1 << 16
"""Numbers that are made at a time: they stay in the processor's cache."""
_ZEROS = memoryview(bytes(WORD_BYTES * CHUNK))


class SecureStream:
    """Random numbers under a key of its own; every stream has a new one, so no two are ever the same, also not in forked processes."""

    def __init__(self) -> None:
        self.cipher = _new_cipher()
        self.data = bytearray(WORD_BYTES * CHUNK + BLOCK_BYTES - 1)
        self.words = torch.frombuffer(self.data, dtype=torch.int64, count=CHUNK)
        self.drawn = torch.empty(CHUNK, dtype=torch.float64)
        self.made = torch.empty(CHUNK, dtype=torch.float64)

    def whole(self, count: int) -> Tensor:
        """Whole numbers from 0 to 2^53 - 1, as doubles; at most ``CHUNK`` of them, in a buffer that the next call uses again."""
        self.cipher.update_into(_ZEROS[: WORD_BYTES * count], self.data)
        return self.drawn[:count].copy_(self.words[:count].bitwise_and_((1 << BITS) - 1))

    def uniform(self, count: int) -> Tensor:
        found = torch.empty(count, dtype=torch.float64)
        for start in range(0, count, CHUNK):
            part = found[start : start + CHUNK]
            part.copy_(self.whole(len(part)))
        return found.mul_(2.0**-BITS)

    def normal(self, count: int) -> Tensor:
        """Standard normal numbers (Box and Muller); at most ``CHUNK`` of them, in a buffer that the next call uses again."""
        half = (count + 1) // 2
        whole, made = self.whole(2 * half), self.made[: 2 * half]
        radius = whole[:half].add_(1).mul_(2.0**-BITS).log_().mul_(-2).sqrt_()
        angle = whole[half:].mul_(2 * math.pi * 2.0**-BITS)
        torch.cos(angle, out=made[:half]).mul_(radius)
        torch.sin(angle, out=made[half:]).mul_(radius)
        return made[:count]

    def add_noise(self, value: Tensor, spread: float) -> Tensor:
        """The value with Gaussian noise of this spread, on a grid; in the type and place of the value."""
        grid = 2.0 ** (math.floor(math.log2(spread)) - GRID_BITS)
        flat = value.detach().reshape(-1).cpu()
        noisy = torch.empty_like(flat)
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK]
            noise = self.normal(len(part)).mul_(spread / grid).round_()
            noisy[start : start + CHUNK] = self.drawn[: len(part)].copy_(part).div_(grid).round_().add_(noise).mul_(grid)
        return noisy.reshape(value.shape).to(value.device)


def _new_cipher() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise MissingExtra(
            "Noise from the system's generator needs cryptography. Install it with: pip install 'polyfed[privacy]'"
        ) from error
    return Cipher(algorithms.AES256(os.urandom(KEY_BYTES)), modes.CTR(bytes(BLOCK_BYTES))).encryptor()
