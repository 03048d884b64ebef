"""Counter-based Gumbel noise, the one that SGLang's seeded sampler uses.

The noise of (seed, position, token id) is a MurmurHash3 of the 16 bytes seed (64 bit) | position
(32 bit) | id (32 bit), turned into a uniform and then into a Gumbel variate in float64. SGLang
0.5.23 draws a seeded token as argmax(log p + noise); a draft drawn from the same noise therefore
tends to agree with the target's own draw, and both are reproducible.
"""

import torch

_LOW = 0xFFFFFFFF
_HASHED_BYTES = 16


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _LOW


def _scramble(k: torch.Tensor) -> torch.Tensor:
    """The part of a mixing round that depends on the key word only."""
    return _rotate((k * 0xCC9E2D51) & _LOW, 15) * 0x1B873593 & _LOW


def _absorb(h: torch.Tensor, scrambled: torch.Tensor) -> torch.Tensor:
    return (_rotate(h ^ scrambled, 13) * 5 + 0xE6546B64) & _LOW


def _finish(h: torch.Tensor) -> torch.Tensor:
    h = h ^ _HASHED_BYTES
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _LOW
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _LOW
    return h ^ (h >> 16)


def hash_bits(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """32-bit hashes as int64 [B, n] of seed [B] int64, position [B] int64 and ids [n] int64."""
    # int64 products wrap around, which leaves their low 32 bits right.
    seed, position, ids = seed.long(), position.long(), ids.long()
    h = torch.zeros_like(seed)
    for word in (seed & _LOW, (seed >> 32) & _LOW, position & _LOW):
        h = _absorb(h, _scramble(word))
    return _finish(_absorb(h[:, None], _scramble(ids & _LOW)))


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64 [B, n], of seed [B], position [B] and token ids [n]."""
    log_uniform = hash_bits(seed, position, ids).to(torch.float64).div_(_LOW).log_()
    # The upper clamp keeps the hash 2**32 - 1 (uniform exactly 1) from winning every draw.
    log_uniform.clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return log_uniform.neg_().log_().neg_()
