"""64-bit integers as two 32-bit words: exact arithmetic where JAX has no 64-bit types, and on GPUs, which have none.

Everything is written in operations on uint32 that the fusion compiler knows: a 32 x 32 -> 64 bit product is four
16-bit ones, a carry is a comparison.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


class Words(NamedTuple):
    """hi, lo: uint32 arrays of one shape (or numpy scalars); the value is ``hi * 2**32 + lo`` mod 2**64."""

    hi: Any
    lo: Any


def u32(value: int) -> Any:
    return np.uint32(value & MASK32)


def constant(value: int) -> Words:
    return Words(u32(value >> 32), u32(value))


def of_array(x: jax.Array) -> Words:
    """The words of a JAX integer or boolean array of any width: signed types are sign-extended."""
    if x.dtype.itemsize == 8:
        bits = x.astype(jnp.uint64)
        return Words((bits >> np.uint64(32)).astype(jnp.uint32), bits.astype(jnp.uint32))
    if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        lo = x.astype(jnp.uint32)
        return Words(jnp.zeros_like(lo), lo)
    wide = x.astype(jnp.int32)
    return Words((wide >> 31).astype(jnp.uint32), wide.astype(jnp.uint32))


def add(a: Words, b: Words) -> Words:
    lo = a.lo + b.lo
    return Words(a.hi + b.hi + (lo < b.lo).astype(jnp.uint32), lo)


def sub(a: Words, b: Words) -> Words:
    return Words(a.hi - b.hi - (a.lo < b.lo).astype(jnp.uint32), a.lo - b.lo)


def neg(a: Words) -> Words:
    return sub(constant(0), a)


def xor(a: Words, b: Words) -> Words:
    return Words(a.hi ^ b.hi, a.lo ^ b.lo)


def shl(a: Words, n: int) -> Words:
    """``a << n`` for 0 < n < 64."""
    if n >= 32:
        zero = jnp.zeros_like(a.lo)
        return Words(a.lo << u32(n - 32) if n > 32 else a.lo, zero)
    return Words(a.hi << u32(n) | a.lo >> u32(32 - n), a.lo << u32(n))


def shr(a: Words, n: int) -> Words:
    """``a >> n``, logical, for 0 < n < 64."""
    if n >= 32:
        zero = jnp.zeros_like(a.hi)
        return Words(zero, a.hi >> u32(n - 32) if n > 32 else a.hi)
    return Words(a.hi >> u32(n), a.lo >> u32(n) | a.hi << u32(32 - n))


def xor_shr(a: Words, n: int) -> Words:
    """``a ^ (a >> n)``, logical, for 0 < n < 64."""
    if n > 32:
        return Words(a.hi, a.lo ^ a.hi >> u32(n - 32))
    return xor(a, shr(a, n))


def mul32(a: Any, b: int) -> Words:
    """The 64-bit product of a uint32 array and a constant below 2**32."""
    b &= MASK32
    lo16, hi16 = u32(b & 0xFFFF), u32(b >> 16)
    a0, a1 = a & u32(0xFFFF), a >> u32(16)
    mid = a1 * lo16 + (a0 * lo16 >> u32(16))
    low = a0 * hi16 + (mid & u32(0xFFFF))
    return Words(a1 * hi16 + (mid >> u32(16)) + (low >> u32(16)), a * u32(b))


def mul(a: Words, b: int) -> Words:
    """``a * b`` mod 2**64 by a constant."""
    low = mul32(a.lo, b)
    return Words(low.hi + (a.lo * u32(b >> 32) + a.hi * u32(b)), low.lo)


def mul_high(a: Words, b: int) -> Words:
    """The upper 64 bits of the 128-bit product of `a` and a constant, both unsigned."""
    ll = mul32(a.lo, b)
    lh, hl, hh = mul32(a.lo, b >> 32), mul32(a.hi, b), mul32(a.hi, b >> 32)
    zero = jnp.zeros_like(ll.hi)
    middle = add(add(Words(zero, ll.hi), Words(zero, lh.lo)), Words(zero, hl.lo))
    high = add(hh, Words(zero, lh.hi))
    return add(add(high, Words(zero, hl.hi)), Words(zero, middle.hi))


def less(a: Words, b: Words) -> jax.Array:
    """Unsigned ``a < b``."""
    return jnp.asarray((a.hi < b.hi) | (a.hi == b.hi) & (a.lo < b.lo))


def less_signed(a: Words, b: Words) -> jax.Array:
    """``a < b`` of two's complement numbers."""
    flip = u32(1 << 31)
    return less(Words(a.hi ^ flip, a.lo), Words(b.hi ^ flip, b.lo))


def equal(a: Words, b: Words) -> jax.Array:
    return jnp.asarray((a.hi == b.hi) & (a.lo == b.lo))


def select(mask: Any, a: Words, b: Words) -> Words:
    """`a` where `mask`, else `b`."""
    return Words(jnp.where(mask, a.hi, b.hi), jnp.where(mask, a.lo, b.lo))


def mod(a: Words, m: int) -> Words:
    """Unsigned ``a % m`` by a constant 1 <= m < 2**63."""
    if m & (m - 1) == 0:
        return Words(a.hi & u32((m - 1) >> 32), a.lo & u32(m - 1))
    zero = jnp.zeros_like(a.lo)
    if m < 1 << 26:  # digits of as many bits as a remainder leaves room for
        width = 32 - m.bit_length()
        rest = a.hi % u32(m)
        left = 32
        while left:
            take = min(width, left)
            left -= take
            digit = (a.lo >> u32(left)) & u32((1 << take) - 1)
            rest = (rest << u32(take) | digit) % u32(m)
        return Words(zero, rest)
    # Barrett: the quotient by floor(2**64 / m) is the true one or one less, so the rest is below 2 * m < 2**64.
    quotient = mul_high(a, (1 << 64) // m)
    rest = sub(a, mul(quotient, m))
    return select(less(rest, constant(m)), rest, sub(rest, constant(m)))


def floor_mod_signed(a: Words, m: int) -> Words:
    """Floor modulus of a two's complement number by a constant 1 <= m < 2**63: in [0, m)."""
    if m & (m - 1) == 0:
        return mod(a, m)
    # A negative number's unsigned value is 2**64 too large. Both remainders lie in [0, m).
    rest = mod(a, m)
    excess = (1 << 64) % m
    negative = a.hi >> u32(31) != 0
    if m < 1 << 31:  # in the low words alone
        fixed = jnp.where(rest.lo < u32(excess), rest.lo + u32(m - excess), rest.lo - u32(excess))
        return Words(rest.hi, jnp.where(negative, fixed, rest.lo))
    less_excess = sub(rest, constant(excess))
    fixed2 = select(less(rest, constant(excess)), add(less_excess, constant(m)), less_excess)
    return select(negative, fixed2, rest)


def to_float32(a: Words, signed: bool) -> jax.Array:
    """The nearest float32, ties to even."""
    negative = a.hi >> u32(31) != 0 if signed else jnp.zeros(jnp.shape(a.hi), bool)
    size = select(negative, neg(a), a)
    shift = jax.lax.clz(jnp.asarray(size.hi))  # 32 where the upper word is empty
    whole = shift < u32(32)
    n = jnp.where(whole, shift, u32(0))
    top = size.hi << n | jnp.where(n == 0, u32(0), size.lo >> (u32(32) - n) % u32(32))
    sticky = ((size.lo << n) != 0).astype(jnp.uint32)  # rounds as the digits cut off would
    scale = jax.lax.bitcast_convert_type((u32(127 + 32) - n) << u32(23), jnp.float32)
    value = jnp.where(
        whole, (top | sticky).astype(jnp.float32) * scale, size.lo.astype(jnp.float32)
    )
    return jnp.where(negative, -value, value)
