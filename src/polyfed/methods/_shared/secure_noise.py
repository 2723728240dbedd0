"""Fast Gaussian noise that cannot be reproduced: AES-256 in counter mode with a key from the system's generator, in double precision.

    out = g ( round(value / g) + round(noise / g) ),   g = 2^-30 of the spread, a power of two

The output is an integer multiple of g, so the last bits of a float reveal nothing about the value (Mironov, 2012; Jin et al., 2022):
every value can produce every multiple of g. Rounding the sum to the type of the value uses no data. Rounding the value increases the
sensitivity to one sample by at most g sqrt(d) for d numbers, which is 4e-6 of the spread for 14 million. Up to a noise multiplier of 60,
the 0.05 % of epsilon that plans leave unspent covers this.

Not covered: the noise is computed from 53-bit numbers, so its probabilities have a relative error of about 2^-22, and it never exceeds 8.6
spreads (a Gaussian does with probability 1e-17). The only protection against timing attacks is that all numbers take the same operations.

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
"""Numbers generated at a time, so that they fit in the CPU cache."""
_ZEROS = memoryview(bytes(WORD_BYTES * CHUNK))


class SecureStream:
    """Random numbers from a new key per stream, so that streams differ even in forked processes."""

    def __init__(self) -> None:
        self.cipher = _new_cipher()
        self.data = bytearray(WORD_BYTES * CHUNK + BLOCK_BYTES - 1)
        self.words = torch.frombuffer(self.data, dtype=torch.int64, count=CHUNK)
        self.drawn = torch.empty(CHUNK, dtype=torch.float64)
        self.made = torch.empty(CHUNK, dtype=torch.float64)

    def whole(self, count: int) -> Tensor:
        """Return at most ``CHUNK`` integers from 0 to 2^53 - 1 as doubles, in a buffer that the next call overwrites."""
        self.cipher.update_into(_ZEROS[: WORD_BYTES * count], self.data)
        return self.drawn[:count].copy_(self.words[:count].bitwise_and_((1 << BITS) - 1))

    def uniform(self, count: int) -> Tensor:
        found = torch.empty(count, dtype=torch.float64)
        for start in range(0, count, CHUNK):
            part = found[start : start + CHUNK]
            part.copy_(self.whole(len(part)))
        return found.mul_(2.0**-BITS)

    def normal(self, count: int) -> Tensor:
        """Return at most ``CHUNK`` standard normal numbers (Box and Muller), in a buffer that the next call overwrites."""
        half = (count + 1) // 2
        whole, made = self.whole(2 * half), self.made[: 2 * half]
        radius = whole[:half].add_(1).mul_(2.0**-BITS).log_().mul_(-2).sqrt_()
        angle = whole[half:].mul_(2 * math.pi * 2.0**-BITS)
        torch.cos(angle, out=made[:half]).mul_(radius)
        torch.sin(angle, out=made[half:]).mul_(radius)
        return made[:count]

    def add_noise(self, value: Tensor, spread: float) -> Tensor:
        """Return the value plus Gaussian noise with standard deviation ``spread``, on a grid, with the value's type and device."""
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
