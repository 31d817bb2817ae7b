"""Statistics of the counter-based bits, and the three forms of the site keys."""

import pytest
import torch

from wholestep.ops.random_bits import (
    GOLDEN64,
    MASK64,
    NORMAL_STREAM,
    base_key,
    bits,
    keep_mask,
    mix,
    mix64,
    normal,
    part_key,
    site_keys,
    split_key,
    uniform,
)

N = 1 << 18
# Six standard deviations of a mean of N fair +-1 variables.
BOUND = 6.0 / N**0.5


def site_key(seed: int, step: int, micro: int, site: int) -> int:
    """The signed key of one site, number by number."""
    value = mix64((base_key(seed, step, micro) + (site + 1) * GOLDEN64) & MASK64)
    return value - 2**64 if value >= 2**63 else value


def key_of(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


KEYS = [0, 1, -1, 2**32, 0x0123456789ABCDEF, *site_keys(0, 1, 0, 3).tolist()]


def signs(values: torch.Tensor) -> torch.Tensor:
    """(N, 32) of +-1, one column per bit."""
    return (((values.reshape(-1, 1) >> torch.arange(32)) & 1) * 2 - 1).float()


def scalar_mix(index: int, key: int) -> int:
    """The hash on Python integers, written independently of tensors."""
    mask = 0xFFFFFFFF
    x = (index ^ key) & mask
    x = (x ^ (x >> 16)) * 0x7FEB352D & mask
    x = (x + ((key >> 32) & mask)) & mask
    x = (x ^ (x >> 15)) * 0x846CA68B & mask
    x = (x ^ (x >> 16)) * 0x9E3779B1 & mask
    return x ^ (x >> 15)


@pytest.mark.parametrize("key", KEYS)
def test_bits_equal_the_scalar_definition(key: int) -> None:
    got = [b & 0xFFFFFFFF for b in bits((100,), key_of(key)).tolist()]
    assert got == [scalar_mix(i, key) for i in range(100)]


@pytest.mark.parametrize("key", KEYS)
def test_bits_are_balanced_and_neighbours_are_independent(key: int) -> None:
    s = signs(bits((N,), key_of(key)))
    assert s.mean(0).abs().max() < BOUND
    pairs = (s.T @ s) / N - torch.eye(32)
    assert pairs.abs().max() < BOUND
    for distance in (1, 2, 3, 64, 1024):
        cross = s[:-distance].T @ s[distance:] / (N - distance)
        assert cross.abs().max() < BOUND * 1.1, distance


def test_other_sites_and_steps_give_other_bits() -> None:
    keys = [*site_keys(0, 1, 0, 2).tolist(), site_key(0, 2, 0, 0), site_key(0, 1, 1, 0), site_key(1, 1, 0, 0)]
    streams = [signs(bits((N,), key_of(k))) for k in keys]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert (a.T @ b / N).abs().max() < BOUND


def test_keys_that_differ_only_in_the_high_half_are_independent_also_when_permuted() -> None:
    """Two keys whose low halves differ by d permute each other's indices (i <-> i ^ d); the high half must undo
    that."""
    low, d = 0x12345678, 0x155
    # The worst case, one difference in 2**32, keeps a correlation of 0.016 on one bit.
    for high, bound in ((1, BOUND), (2, BOUND), (0x9E3779B9, BOUND), (0x80000000, 0.03)):
        a = signs(bits((N,), key_of(low)))
        b = bits((N,), key_of(((high << 32) | (low ^ d)) - (2**64 if high >= 2**31 else 0)))
        permuted = signs(b[torch.arange(N) ^ d])
        assert (a.T @ permuted / N).abs().max() < bound, hex(high)


def test_two_keys_share_no_shifted_stretch() -> None:
    first, second = (
        set(zip(b[:-1].tolist(), b[1:].tolist(), strict=True)) for b in (bits((N,), key_of(k)) for k in KEYS[-2:])
    )
    assert not first & second


def test_indices_beyond_two_to_the_31_differ() -> None:
    lo, hi = split_key(key_of(KEYS[-1]))
    index = torch.arange(1000, dtype=torch.int32)
    below, above = mix(index, lo, hi), mix(index, lo, hi + 0x7FEB352D)
    assert (below == above).sum() == 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_mask_has_the_asked_share(p: float) -> None:
    kept = keep_mask((N,), p, key_of(KEYS[-1])).double()
    assert abs(kept.mean().item() - (1 - p)) < 6 * (p * (1 - p) / N) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_uniform(dtype: torch.dtype) -> None:
    u = uniform((N,), key_of(KEYS[-1]), dtype)
    assert u.dtype == dtype
    assert u.min() >= 0 and u.max() < 1
    mean_of_truncation = 0.5 - {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}.get(dtype, 0.0)
    assert abs(u.double().mean().item() - mean_of_truncation) < 6 * (1 / 12 / N) ** 0.5
    assert abs(u.double().var().item() - 1 / 12) < 1e-3


def test_float64_uniform_is_the_float32_one() -> None:
    key = key_of(KEYS[-1])
    assert torch.equal(uniform((64,), key, torch.float64), uniform((64,), key, torch.float32).double())


def test_normal() -> None:
    x = normal((N,), key_of(KEYS[-1])).double()
    assert x.isfinite().all()
    assert abs(x.mean().item()) < BOUND
    assert abs(x.var().item() - 1) < 6 * (2 / N) ** 0.5
    assert abs((x**4).mean().item() - 3) < 0.1
    assert abs((x[1:] * x[:-1]).mean().item()) < BOUND
    assert NORMAL_STREAM < 2**63


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_a_tensor_draw_what_the_whole_draws(dim: int) -> None:
    key, shape, parts = key_of(KEYS[4]), (4, 6, 2), 2
    own = [size // parts if d == dim else size for d, size in enumerate(shape)]
    keys = [part_key(key, own, dim, parts, torch.tensor(rank)) for rank in range(parts)]
    for draw in (bits, uniform, normal, lambda shape, key: keep_mask(shape, 0.3, key)):
        assert torch.equal(torch.cat([draw(own, one) for one in keys], dim), draw(shape, key))


def test_operators_match_their_functions_and_fakes() -> None:
    key = key_of(KEYS[-1])
    assert torch.equal(torch.ops.ws.uniform([3, 5], key, torch.float32), uniform((3, 5), key))
    for op in (torch.ops.ws.uniform.default, torch.ops.ws.normal.default):
        torch.library.opcheck(op, ([3, 5], key, torch.bfloat16), test_utils=("test_schema", "test_faketensor"))


def test_uniform_refuses_integers() -> None:
    with pytest.raises(TypeError, match="int32"):
        uniform((3,), key_of(0), torch.int32)


def test_site_keys_agree_with_the_scalar_form_and_are_distinct() -> None:
    keys = [k for step in range(20) for micro in range(3) for k in site_keys(7, step, micro, 50).tolist()]
    assert keys == [site_key(7, step, micro, site) for step in range(20) for micro in range(3) for site in range(50)]
    assert len(set(keys)) == len(keys)
    assert len({k & 0xFFFFFFFF for k in keys}) == len(keys)
    s = (((torch.tensor(keys).reshape(-1, 1) >> torch.arange(64)) & 1) * 2 - 1).float()
    assert s.mean(0).abs().max() < 6 / len(keys) ** 0.5


def test_site_keys_accept_negative_seeds_and_no_sites() -> None:
    assert site_keys(-1, 0, 0, 0).shape == (0,)
    assert site_key(-1, 0, 0, 0) == site_keys(-1, 0, 0, 1).item()
