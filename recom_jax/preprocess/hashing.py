"""Operators that hash: the same 64-bit arithmetic everywhere, in 32-bit words (`words`).

`sigrid_hash` is TorchArrow's; `hash_bucket` and `hashed_cross` are those of TensorFlow's feature columns, over the
fingerprints that `fingerprint64` makes of strings on the host.
"""

from __future__ import annotations

from typing import Any

from recom_jax import strings as text
from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess import words
from recom_jax.preprocess.int64 import Int64
from recom_jax.preprocess.operator import OPERATORS, need_integer, operator
from recom_jax.preprocess.values import (
    Column,
    Jagged,
    both,
    from_words,
    map_values,
    put_together,
    same_rows,
    take_apart,
    words_of,
)
from recom_jax.preprocess.words import MASK64, Words

_MURMUR = 0x9DDFEA08EB382D69
_CAT = 0xC6A4A7935BD1E995
_CROSS_KEY = 0xDECAFCAFFE


def _need_size(name: str, parameter: str, value: Any) -> None:
    need_integer(name, **{parameter: value})
    if not 1 <= value < 1 << 63:
        raise PreprocessError(f"{name}: {parameter} is at least 1 and below 2**63, not {value}")


def _check_sigrid(salt: Any, max_value: Any) -> None:
    need_integer("sigrid_hash", salt=salt)
    _need_size("sigrid_hash", "max_value", max_value)


def twang_mix64(k: Words) -> Words:
    """Thomas Wang's 64-bit mix, as folly has it."""
    ones = words.constant(MASK64)
    k = words.add(words.xor(k, ones), words.shl(k, 21))
    k = words.xor_shr(k, 24)
    k = words.mul(k, 1 + (1 << 3) + (1 << 8))
    k = words.xor_shr(k, 14)
    k = words.mul(k, 1 + (1 << 2) + (1 << 4))
    k = words.xor_shr(k, 28)
    return words.add(k, words.shl(k, 31))


@operator(check=_check_sigrid)
def sigrid_hash(x: Column, salt: int, max_value: int) -> Column:
    """Hashes ids into [0, max_value), as TorchArrow's ``sigrid_hash``: the same bits on every platform.

    Args:
      x: integers, dense (B,) or lists.
      salt: any integer; taken mod 2**64.
      max_value: 1 <= max_value < 2**63.

    Returns:
      int32 where ``max_value <= 2**31``, else 64-bit (`Int64` with x64 off); nulls stay null.

    Raises:
      PreprocessError (a ValueError): `max_value` out of range.
      PreprocessTypeError (a TypeError): `x` is not made of integers, or a parameter is no integer.
    """
    seed = words.constant(salt)

    def hashed(v: Any) -> Any:
        k = twang_mix64(words_of(v, "sigrid_hash"))
        a = words.xor_shr(words.mul(words.xor(k, seed), _MURMUR), 47)
        b = words.xor_shr(words.mul(words.xor(a, seed), _MURMUR), 47)
        return from_words(words.floor_mod_signed(words.mul(b, _MURMUR), max_value), max_value)

    return map_values(x, hashed)


@operator(check=lambda num_buckets: _need_size("hash_bucket", "num_buckets", num_buckets))
def hash_bucket(x: Column, num_buckets: int) -> Column:
    """Fingerprints mod `num_buckets`, unsigned: ``hash_bucket(fingerprint64(strings), n)`` is TensorFlow's
    ``categorical_column_with_hash_bucket`` of those strings.

    Args:
      x: 64-bit fingerprints (negative numbers count as 2**64 more), dense (B,) or lists.
      num_buckets: 1 <= num_buckets < 2**63.

    Returns:
      int32 where ``num_buckets <= 2**31``, else 64-bit; nulls stay null.
    """
    return map_values(
        x,
        lambda v: from_words(words.mod(words_of(v, "hash_bucket"), num_buckets), num_buckets),
    )


def hashed_cross(*columns: Column, num_buckets: int) -> Column:
    """The bucket of a combination of features, as TensorFlow's ``crossed_column`` of dense features hashes it.

    Args:
      columns: at least two dense (B,) integer columns: ids as they are, or fingerprints of strings.
      num_buckets: 1 <= num_buckets < 2**63.

    Returns:
      (B,) int32 where ``num_buckets <= 2**31``, else 64-bit; null where any input is.
    """
    _need_size("hashed_cross", "num_buckets", num_buckets)
    if len(columns) < 2:
        raise PreprocessError(f"hashed_cross takes at least two columns, not {len(columns)}")
    same_rows("hashed_cross", *columns)
    key: Any = None
    for k, x in enumerate(columns):
        last = num_buckets if k + 1 == len(columns) else 0
        key = _cross(x if key is None else key, x, key is None, last)
    return key


@operator(columns=2)
def _cross(key: Column, x: Column, first: bool, num_buckets: int) -> Column:
    """One more feature in a cross; with `num_buckets` (not 0) the bucket of all."""
    if isinstance(x, Jagged):
        raise PreprocessTypeError("hashed_cross takes dense columns, not lists")
    values, valid = take_apart(x)
    known, was_valid = take_apart(key)
    state = words.constant(_CROSS_KEY) if first else words_of(known, "hashed_cross")
    mixed = words.mul(words.xor_shr(words.mul(words_of(values, "hashed_cross"), _CAT), 47), _CAT)
    mixed = words.mul(words.xor(mixed, words.xor(state, words.constant(_CAT))), _CAT)
    mixed = words.xor_shr(words.mul(words.xor_shr(mixed, 47), _CAT), 47)
    made = (
        from_words(words.mod(mixed, num_buckets), num_buckets)
        if num_buckets
        else Int64(*mixed, unsigned=True)
    )
    return put_together(made, both(valid, was_valid))


OPERATORS["hashed_cross"] = hashed_cross


def fingerprint64(strings: Any, threads: int | None = None) -> Any:
    """TensorFlow's ``Fingerprint64`` (FarmHash) of a column of strings: `recom_jax.strings.fingerprint64`, as a column.

    Args:
      strings: (B,) str or bytes: a list, a numpy array, or a pyarrow array (nulls stay null; lists of strings give
        `Jagged`). str is hashed as UTF-8.
      threads: at most so many (default: as many as there are cores, up to 8).

    Returns:
      `Int64` of unsigned fingerprints, of numpy words; `Nullable` or `Jagged` of them for such pyarrow arrays.

    Raises:
      ArgumentError, PreprocessTypeError (TypeErrors): not strings.
      StringError (a ValueError): a null outside of a pyarrow array, or a str without UTF-8 form.
    """
    if type(strings).__module__.partition(".")[0] == "pyarrow":
        from recom_jax.preprocess.ingest import fingerprint_arrow

        return fingerprint_arrow(strings, threads)
    return Int64(text.fingerprint64(strings, threads=threads))


__all__ = ["fingerprint64", "hash_bucket", "hashed_cross", "sigrid_hash"]
