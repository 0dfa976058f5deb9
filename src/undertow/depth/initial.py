"""The initial state of each token: noise that is a pure function of a seed and the token's
position.

A token's state must not depend on what it is computed together with, or decoding with a cache would
differ from one pass, and a batch from its rows. So the noise is no generator's stream but a hash of
(seed, position, channel).
"""

from __future__ import annotations

import math

import torch

from undertow.errors import ConfigError

_MASK = 0xFFFFFFFF
# The part of a normal distribution within three standard deviations.
_LOW = 0.5 * (1 + math.erf(-3 / math.sqrt(2)))


def initial_state(
    positions: torch.Tensor, width: int, std: float, seed: int | torch.Tensor = 0
) -> torch.Tensor:
    """Noise ``[B, T, width]`` for tokens at absolute `positions` ``[B, T]``: normal, cut at three
    standard deviations.

    `seed` is a number, or one for each row ``[B]``. `std` is that of the uncut distribution; 0
    gives zeros. In fp32.

    Raises:
        ConfigError: there are more or fewer seeds than rows.
    """
    if std == 0:
        return torch.zeros(*positions.shape, width, device=positions.device)
    if isinstance(seed, torch.Tensor) and seed.ndim:
        if seed.shape != positions.shape[:1]:
            raise ConfigError(
                f"there are {seed.numel()} seeds for {len(positions)} rows; give one, or one a row"
            )
        seed = seed[:, None].to(positions.device)
    key = _hash(_hash(positions.long() & _MASK) ^ _hash_any(seed, positions))
    channel = torch.arange(width, device=positions.device) * 0x9E3779B9
    bits = _hash((key[..., None] + channel) & _MASK)
    uniform = ((bits >> 8).float() + 0.5) / 2**24  # in (0, 1)
    share = _LOW + (1 - 2 * _LOW) * uniform
    return (std * math.sqrt(2)) * torch.erfinv(2 * share - 1)


def mix(*numbers: int) -> int:
    """One seed made of several numbers, such as a seed and a step."""
    mixed = 0
    for number in numbers:
        mixed = (
            mixed * 6364136223846793005 + (number ^ (number >> 32)) * 2 + 1442695040888963407
        ) % 2**64
        mixed ^= mixed >> 29
    return mixed % 2**62


def row_seeds(seed: int, rows: int) -> torch.Tensor:
    """A seed of its own for each row of a training batch ``[rows]``."""
    return torch.tensor([mix(seed, row) for row in range(rows)])


def _hash_any(seed: int | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    value = torch.as_tensor(seed, dtype=torch.long, device=like.device)
    return _hash((_hash(value & _MASK) + (value >> 32)) & _MASK)


def _hash(value: torch.Tensor) -> torch.Tensor:
    """A 32-bit integer hash with good avalanche, in int64 arithmetic that no device rounds."""
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & _MASK
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & _MASK
    return value ^ (value >> 16)
