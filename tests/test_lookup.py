"""Lookups: every spelling of a table read, every dtype, every id expression, and the odd inputs. Bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import check, ids, table

from recom_jax import Options, optimize, templates

ROWS, DIM = 11, 5

SPELLINGS = {
    "index": lambda t, i: t[i],
    "take": lambda t, i: jnp.take(t, i, axis=0),
    "take_clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "take_wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "take_fill": lambda t, i: jnp.take(t, i, axis=0, mode="fill"),
    "take_fill_value": lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=7.5),
    "get": lambda t, i: t.at[i].get(),
    "get_fill": lambda t, i: t.at[i].get(mode="fill"),
    "get_fill_value": lambda t, i: t.at[i].get(mode="fill", fill_value=-0.0),
    "get_clip": lambda t, i: t.at[i].get(mode="clip"),
    "get_no_wrap": lambda t, i: t.at[i].get(mode="fill", fill_value=1, wrap_negative_indices=False),
    "get_no_wrap_clip": lambda t, i: t.at[i].get(mode="clip", wrap_negative_indices=False),
    "columns_written": lambda t, i: t[i, :],
    "two_wide": lambda t, i: jax.vmap(lambda k: t[(k,)])(i.reshape(-1)),
    "vmap": lambda t, i: jax.vmap(lambda k: t[k])(i.reshape(-1)),
    "vmap_take": lambda t, i: jax.vmap(lambda k: jnp.take(t, k, axis=0))(i.reshape(-1)),
    "vmap_dynamic_index": lambda t, i: jax.vmap(
        lambda k: jax.lax.dynamic_index_in_dim(t, k, keepdims=False)
    )(i.reshape(-1)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_with_odd_ids(name: str) -> None:
    report = check(SPELLINGS[name], table(ROWS, DIM), ids((6, 4), ROWS, odd=True), columns=1)
    column = report.columns[0]
    assert (column.rows, column.dim, column.dtype, column.combiner) == (
        ROWS,
        DIM,
        "float32",
        "none",
    )


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (0,), (4, 0), (0, 3)]
)
def test_id_shapes(shape: tuple[int, ...]) -> None:
    def model(t: Any, i: Any) -> Any:
        return {"fill": t[i], "clip": jnp.take(t, i, axis=0, mode="clip")}

    empty = 0 in shape  # JAX traces no gather then
    check(
        model,
        table(ROWS, DIM),
        ids(shape, ROWS, odd=True),
        columns=0 if empty else 2,
        calls=1 - empty,
    )


def test_promise_in_bounds() -> None:
    check(
        lambda t, i: t.at[i].get(mode="promise_in_bounds"),
        table(ROWS, DIM),
        ids((6, 3), ROWS),
        columns=1,
    )


def test_scalar_python_index_is_right_whatever_it_becomes() -> None:
    check(lambda t, i: t[i] + t[3], table(ROWS, DIM), ids((6,), ROWS), columns=None, fused=1)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"])
def test_id_dtypes(dtype: str) -> None:
    i = ids((9,), 5, odd=True, dtype=np.int32)
    i = (
        jnp.asarray(np.asarray(i) % 2 == 0)
        if dtype == "bool"
        else ids((9,), 5, odd=True, dtype=np.dtype(dtype))
    )

    def model(t: Any, i: Any) -> Any:
        out = {"take": jnp.take(t, i.astype(jnp.int32) if i.dtype == bool else i, axis=0)}
        if i.dtype != bool:
            out |= {
                "index": t[i],
                "clip": jnp.take(t, i, axis=0, mode="clip"),
                "wrap": jnp.take(t, i, axis=0, mode="wrap"),
                "as_uint32": t[i.astype(jnp.uint32)],
                "as_uint8": t[i.astype(jnp.uint8)],
                "as_int8": t.at[i.astype(jnp.int8)].get(mode="fill", fill_value=3.0),
            }
        return out

    check(model, table(5, 3), i)


def test_ids_that_cannot_count_every_row() -> None:
    t, i, j = table(300, 2), ids((40,), 127, dtype=np.int8), ids((40,), 256, dtype=np.uint8)

    def model(t: Any, i: Any, j: Any) -> Any:
        signed = t.at[i].get(mode="fill", fill_value=1, wrap_negative_indices=False)
        return signed, t[j], jnp.take(t, j, axis=0, mode="clip")

    check(model, t, i - 20, j, columns=3)
    with pytest.raises(OverflowError):  # JAX cannot add 300 to an int8
        jax.jit(lambda t, i: t[i])(t, i)
    with pytest.raises(OverflowError):
        optimize(lambda t, i: t[i])(t, i)


DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "bool",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_table_dtypes(dtype: str) -> None:
    def model(t: Any, i: Any) -> Any:
        return {
            "fill": t[i],
            "clip": jnp.take(t, i, axis=0, mode="clip"),
            "zero": t.at[i].get(mode="fill", fill_value=0),
            "vmap": jax.vmap(lambda k: t[k])(i[:, 0]),
        }

    check(model, table(ROWS, DIM, dtype), ids((5, 3), ROWS, odd=True), columns=4)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "float32", "bfloat16"])
@pytest.mark.parametrize("id_dtype", ["int64", "uint64", "int32"])
def test_x64(dtype: str, id_dtype: str) -> None:
    with jax.enable_x64(True):

        def model(t: Any, i: Any) -> Any:
            return {
                "fill": t[i],
                "clip": jnp.take(t, i, axis=0, mode="clip"),
                "wrap": jnp.take(t, i, axis=0, mode="wrap"),
                "hash": t[(i * jnp.uint64(0x9E3779B97F4A7C15) >> 3) % 11]
                if i.dtype == jnp.uint64
                else t[i % 11],
            }

        check(
            model,
            table(ROWS, DIM, dtype),
            ids((6, 2), ROWS, odd=True, dtype=np.dtype(id_dtype)),
            columns=4,
        )


LONG_IDS = {
    "int64": [1, -1, -5, 4, 2**32 + 1, 1 - 2**32, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**62 + 3],
    "uint64": [1, 5, 2**32 + 1, 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 3],
    "uint32": [1, 5, 2**31 + 1, 2**32 - 1],
}


@pytest.mark.parametrize("id_dtype", LONG_IDS)
def test_ids_beyond_int32(id_dtype: str) -> None:
    """A filling gather of JAX's casts its ids to int32 before it looks at them; a clipping one does not."""
    with jax.enable_x64(True):

        def model(t: Any, i: Any) -> Any:
            return {
                "index": t[i],
                "take": jnp.take(t, i, axis=0),
                "fill": jnp.take(t, i, axis=0, mode="fill", fill_value=7.0),
                "get": t.at[i].get(mode="fill", fill_value=-5.0),
                "clip": jnp.take(t, i, axis=0, mode="clip"),
                "wrap": jnp.take(t, i, axis=0, mode="wrap"),
                "promised": t.at[i].get(mode="promise_in_bounds"),
                "bag": jnp.take(t, jnp.stack([i, i], 1), axis=0).sum(1),
                "masked": jnp.where((i >= 0)[:, None], jnp.take(t, i, axis=0), 0),
                "hashed": jnp.take(t, i % 8, axis=0),
                "one_hot": jax.nn.one_hot(i, 4, dtype=t.dtype) @ t,
                "dynamic": jax.vmap(lambda k: jax.lax.dynamic_index_in_dim(t, k, keepdims=False))(
                    i
                ),
            }

        long = np.array(LONG_IDS[id_dtype], id_dtype)
        check(model, table(4, 3), long, columns=12, bound=1e-6)


def test_nan_payload_rows_inf_and_negative_zero_survive() -> None:
    t = jnp.array([[np.nan, np.inf], [-np.inf, -0.0], [0.0, 1e-45]], jnp.float32)
    check(
        lambda t, i: (
            t[i],
            t.astype(jnp.bfloat16)[i],
            -t[i],
            jnp.abs(t[i]),
            jnp.where(t[i] > 0, t[i], 1.0),
        ),
        t,
        ids((9,), 3, odd=True),
    )


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 64, 100, 129])
def test_widths(width: int) -> None:
    def model(t: Any, h: Any, i: Any) -> Any:
        return jnp.concatenate([t[i], jnp.take(t, i, axis=0, mode="clip")], -1), h[i]

    check(model, table(6, width), table(6, width, jnp.bfloat16), ids((37,), 6, odd=True), columns=3)


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_row_counts(rows: int) -> None:
    def model(t: Any, i: Any) -> Any:
        return (
            t[i],
            jnp.take(t, i, axis=0, mode="clip"),
            jnp.take(t, i, axis=0, mode="wrap"),
            t[i % rows],
        )

    check(model, table(rows, 4), ids((20,), rows, odd=True), columns=4)


def test_table_of_no_rows_is_right() -> None:
    def model(t: Any, i: Any) -> Any:
        return t.at[i].get(mode="fill", fill_value=2.0), jnp.take(t, i, axis=0)

    args = jnp.zeros((0, 4)), ids((5,), 3)
    with pytest.raises(Exception) as plain:
        jax.jit(model)(*args)
    with pytest.raises(plain.type):
        optimize(model)(*args)


def test_table_of_no_columns() -> None:
    from helpers import run

    t, i = jnp.zeros((4, 0)), ids((5,), 4)
    got, _ = run(lambda t, i: (t[i], t[i].sum(0)), t, i)
    assert got[0].shape == (5, 0)
    assert got[1].shape == (0,)


# ---- tables that are not plain arguments --------------------------------------------------------------------


def test_constant_table() -> None:
    t = table(ROWS, DIM)
    report = check(lambda i: jnp.take(t, i, axis=0), ids((8,), ROWS, odd=True), columns=1)
    assert "constant" in report.columns[0].table


def test_numpy_constant_table() -> None:
    t = np.asarray(table(ROWS, DIM))
    check(lambda i: jnp.asarray(t)[i], ids((8,), ROWS, odd=True), columns=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_whole_table_cast_like_flax_embed(dtype: str) -> None:
    def model(t: Any, i: Any) -> Any:
        e = t.astype(dtype)
        return jnp.take(e, i, axis=0), jnp.take(e, i, axis=0, mode="clip").astype(jnp.float32)

    report = check(model, table(ROWS, DIM), ids((6, 2), ROWS, odd=True), columns=2)
    if dtype != "float32":
        assert "cast-after-gather" in report.columns[1].rewrites


def test_whole_table_cast_up() -> None:
    check(
        lambda t, q, i: (
            t.astype(jnp.float32)[i],
            q.astype(jnp.float32).at[i].get(mode="fill", fill_value=0),
        ),
        table(ROWS, DIM, jnp.bfloat16),
        table(ROWS, DIM, jnp.int8),
        ids((6,), ROWS, odd=True),
        columns=2,
    )


def test_cast_up_then_a_fill_that_the_narrow_dtype_lacks() -> None:
    check(
        lambda q, i: (q.astype(jnp.float32)[i], q.astype(jnp.int32)[i]),
        table(ROWS, DIM, jnp.int8),
        ids((6,), ROWS, odd=True),
        columns=2,
    )


def test_scaled_table() -> None:
    check(
        lambda t, i: jnp.take(t * 0.5, i, axis=0, mode="clip"),
        table(ROWS, DIM),
        ids((6,), ROWS, odd=True),
        columns=1,
    )


def test_quantised_rows_with_scales() -> None:
    def model(q: Any, scale: Any, bias: Any, i: Any) -> Any:
        return q[i].astype(jnp.float32) * scale[i] + bias[i], q[i].astype(jnp.float32) * scale[i]

    args = (
        table(ROWS, DIM, jnp.int8),
        table(ROWS, 1),
        table(ROWS, 1, seed=1),
        ids((6,), ROWS, odd=True),
    )
    check(model, *args, calls=None, leaves_gather=True, bound=(1e-4, 0))


def test_quantised_rows_with_rank_one_scales() -> None:
    def model(q: Any, scale: Any, i: Any) -> Any:
        return q.at[i].get(mode="clip").astype(jnp.float32) * scale.at[i].get(mode="clip")[:, None]

    check(
        model,
        table(ROWS, DIM, jnp.int8),
        table(ROWS, 1)[:, 0],
        ids((6,), ROWS, odd=True),
        columns=1,
        leaves_gather=True,
    )


def test_rank_one_tables_are_no_columns() -> None:
    def model(t: Any, v: Any, i: Any) -> Any:
        return t[i], v[i]

    check(
        model,
        table(ROWS, DIM),
        jnp.arange(11.0),
        ids((6,), ROWS, odd=True),
        columns=1,
        leaves_gather=True,
    )


def test_only_rank_one_tables_nothing_to_fuse() -> None:
    report = check(
        lambda v, i, t: v[i] + t[i].sum(-1),
        jnp.arange(11.0),
        ids((6,), ROWS, odd=True),
        table(ROWS, 3),
        calls=None,
        columns=1,
        bound=1e-4,
        leaves_gather=True,
    )
    assert report.columns[0].dim == 3


def test_stacked_tables_under_vmap() -> None:
    stacked = jnp.stack([table(ROWS, DIM, seed=k) for k in range(3)])

    def model(ts: Any, i: Any) -> Any:
        return {
            "index": jax.vmap(lambda t, k: t[k])(ts, i),
            "clip": jax.vmap(lambda t, k: jnp.take(t, k, axis=0, mode="clip"))(ts, i),
            "joined": jax.vmap(lambda t, k: t[k], out_axes=1)(ts, i).reshape(i.shape[1], -1),
        }

    check(model, stacked, ids((3, 8), ROWS, odd=True), columns=3)


def test_stacked_tables_bags_under_vmap() -> None:
    stacked = jnp.stack([table(ROWS, DIM, seed=k) for k in range(3)])
    check(
        lambda ts, i: jax.vmap(lambda t, k: t[k].max(1))(ts, i),
        stacked,
        ids((3, 4, 2), ROWS, odd=True),
        columns=1,
    )


def test_table_columns_read_in_part() -> None:
    check(
        lambda t, i: (t[i][:, 1:4], t[i][..., ::2]),
        table(ROWS, 8),
        ids((6,), ROWS, odd=True),
        calls=None,
        fused=None,
    )


def test_table_slice_and_transpose_are_right() -> None:
    def model(t: Any, i: Any) -> Any:
        return (
            t[2:7][i],
            t.T[:, i],
            t[:, 1:3][i],
            t[::-1][i],
            t.reshape(-1, 3)[i],
            t[:, ::-1][i],
            jnp.roll(t, 1, 0)[i],
        )

    check(model, table(12, 6), ids((5,), 4, odd=True), columns=0, calls=0, leaves_gather=True)


def test_square_table_transposed_is_right() -> None:
    def model(t: Any, i: Any) -> Any:
        return t.T[i], jax.nn.one_hot(i, 6) @ t.T, t[i], jnp.take(t.T + 1.0, i, axis=0, mode="clip")

    check(model, table(6, 6), ids((5,), 6, odd=True), columns=1, leaves_gather=True)


# ---- ids -----------------------------------------------------------------------------------------------------

IDS = {
    "clip": lambda i: jnp.clip(i, 0, ROWS - 1),
    "clip_wide": lambda i: jnp.clip(i, -3, ROWS + 2),
    "mod": lambda i: i % ROWS,
    "rem": lambda i: jax.lax.rem(i, jnp.int32(ROWS)),
    "floor_divide": lambda i: i // 7,
    "lax_div": lambda i: jax.lax.div(i, jnp.int32(3)),
    "oov": lambda i: jnp.where((i < 0) | (i >= ROWS), 0, i),
    "oov_last": lambda i: jnp.where((i >= 0) & (i < ROWS), i, ROWS - 1),
    "abs": lambda i: jnp.abs(i) % ROWS,
    "neg": lambda i: -i,
    "offset": lambda i: i + 3,
    "multiply": lambda i: i * 5 % ROWS,
    "xor": lambda i: (i ^ (i >> 4)) & 7,
    "or_not": lambda i: (~i | 1) % ROWS,
    "shift": lambda i: jax.lax.shift_right_logical(i, jnp.int32(28)),
    "shift_by_id": lambda i: jnp.left_shift(1, i) % ROWS,
    "int8": lambda i: i.astype(jnp.int8).astype(jnp.int32),
    "bool": lambda i: (i > 3).astype(jnp.int32),
    "sign": lambda i: jnp.sign(i) + 1,
    "minmax": lambda i: jnp.maximum(jnp.minimum(i, 9), 1),
    "popcount": lambda i: jax.lax.population_count(i) % ROWS,
    "clz": lambda i: jax.lax.clz(i) % ROWS,
    "compare_chain": lambda i: jnp.where(i > 5, jnp.where(i > 8, 2, 1), 0),
    "knuth": lambda i: ((i.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 16) % jnp.uint32(ROWS),
    "murmur": lambda i: _murmur(i.astype(jnp.uint32)) % jnp.uint32(ROWS),
    "murmur_signed": lambda i: (
        (_murmur(i.astype(jnp.uint32)) & jnp.uint32(0x7FFFFFFF)).astype(jnp.int32) % ROWS
    ),
    "square": lambda i: i * i % ROWS,
    "power": lambda i: i**2 % ROWS,
    "divmod": lambda i: jnp.divmod(i, 4)[0] % ROWS + jnp.divmod(i, 4)[1],
    "remainder_negative": lambda i: i % -ROWS,
    "zero_divisor": lambda i: jnp.clip(i // jnp.where(i > 3, 0, 2), 0, 9),
    "iota": lambda i: (i + jnp.arange(i.shape[0])) % ROWS,
    "reversed": lambda i: i[::-1] % ROWS,
    "strided": lambda i: i[1::3] % ROWS,
    "concatenated": lambda i: jnp.concatenate([i[:3], i[5:]]) % ROWS,
    "padded": lambda i: jnp.pad(i, (1, 2)) % ROWS,
    "rolled": lambda i: jnp.roll(i, 2) % ROWS,
    "sorted": lambda i: jnp.sort(i) % ROWS,
    "cumsum": lambda i: jnp.cumsum(i) % ROWS,
    "looked_up_number": lambda i: jnp.arange(40)[::-1][jnp.clip(i, 0, 39)] % ROWS,
}


def _murmur(h: Any) -> Any:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


@pytest.mark.parametrize("name", IDS)
def test_id_expressions(name: str) -> None:
    def model(t: Any, i: Any) -> Any:
        k = IDS[name](i)
        return t[k], jnp.take(t, k, axis=0, mode="clip"), t.at[k].get(mode="fill", fill_value=0.5)

    check(
        model,
        table(ROWS, 3),
        ids((24,), ROWS, odd=True, seed=3),
        columns=3,
        leaves_gather=True,
        leaves_while=True,
    )


def test_uint64_hash_chain() -> None:
    def split_mix(x: Any) -> Any:
        x = x + jnp.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> 30)) * jnp.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> 27)) * jnp.uint64(0x94D049BB133111EB)
        return x ^ (x >> 31)

    with jax.enable_x64(True):

        def model(t: Any, i: Any) -> Any:
            h = split_mix(i.astype(jnp.uint64))
            return (
                t[h % 11],
                t[(h >> 32).astype(jnp.int32) % 11],
                t[(h % jnp.uint64(13)).astype(jnp.int64)],
            )

        check(model, table(ROWS, 3), ids((20,), ROWS, odd=True, dtype=np.int64), columns=3)


FLOATS = np.array(
    [
        0.0,
        -0.0,
        0.5,
        1.0,
        1.5,
        2.5,
        2.9999998,
        3.0,
        -0.5,
        -1.0,
        10.0,
        10.5,
        11.0,
        1e9,
        -1e9,
        3e38,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        5.0,
        7.25,
        2147483648.0,
        -2147483904.0,
    ],
    np.float32,
)

FLOAT_IDS = {
    "cast": lambda x: x.astype(jnp.int32),
    "cast_unsigned": lambda x: x.astype(jnp.uint32),
    "cast_int8": lambda x: x.astype(jnp.int8),
    "floor": lambda x: jnp.floor(x).astype(jnp.int32),
    "ceil": lambda x: jnp.ceil(x).astype(jnp.int32),
    "round": lambda x: jnp.round(x).astype(jnp.int32),
    "round_away": lambda x: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO).astype(
        jnp.int32
    ),
    "clip": lambda x: jnp.clip(x, 0, 10).astype(jnp.int32),
    "scale": lambda x: (x * 0.7).astype(jnp.int32),
    "nan_to_zero": lambda x: jnp.where(jnp.isnan(x), 0.0, x).astype(jnp.int32),
    "missing": lambda x: jnp.where(jnp.isfinite(x), x.astype(jnp.int32), ROWS - 1),
    "log": lambda x: jnp.floor(jnp.log1p(jnp.maximum(x, 0.0))).astype(jnp.int32),
    "affine": lambda x: (x * 0.3 + 1.7).astype(jnp.int32),
    "divide": lambda x: (x / 3.0).astype(jnp.int32),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)).astype(jnp.int32),
    "bits": lambda x: (jax.lax.bitcast_convert_type(x, jnp.uint32) * jnp.uint32(2654435761)) >> 29,
    "float_mod": lambda x: (x % 5.0).astype(jnp.int32),
    "compare": lambda x: (x > 1.5).astype(jnp.int32) + (x != 3.0).astype(jnp.int32),
    "bfloat16": lambda x: x.astype(jnp.bfloat16).astype(jnp.int32),
    "float16": lambda x: x.astype(jnp.float16).astype(jnp.float32).astype(jnp.int32),
}


@pytest.mark.parametrize("name", FLOAT_IDS)
def test_ids_from_floats(name: str) -> None:
    def model(t: Any, x: Any) -> Any:
        k = FLOAT_IDS[name](x)
        return t[k], jnp.take(t, k, axis=0, mode="clip")

    check(model, table(ROWS, 3), jnp.asarray(FLOATS), columns=2)


def test_fast_ids_fuse_inexact_ids() -> None:
    def model(t: Any, x: Any) -> Any:
        return t[(x * 0.25 + 1.0).astype(jnp.int32)]

    report = check(
        model,
        table(ROWS, 3),
        jnp.arange(0.0, 8.0),
        columns=1,
        options=Options(verify=True, fast_ids=True),
    )
    assert "mul" in report.columns[0].ids


@pytest.mark.parametrize("fast", [False, True])
def test_ids_rounded_and_widened_are_xlas(fast: bool) -> None:
    """XLA for GPUs leaves out float32 -> float16 -> float32, XLA for CPUs does not."""

    def model(t: Any, x: Any) -> Any:
        return t[x.astype(jnp.float16).astype(jnp.float32).astype(jnp.int32)]

    options = Options(verify=True, fast_ids=fast)
    report = check(model, table(ROWS, 3), jnp.arange(0.0, 8.0), columns=1, options=options)
    assert ("float16" in report.columns[0].ids) == fast


# ---- buckets ---------------------------------------------------------------------------------------------------

BOUNDARIES = {
    "ascending": [-2.0, 0.0, 1e-7, 0.5, 3.0, 10.0],
    "uniform": [0.0, 5.0, 10.0, 15.0, 20.0],
    "nearly_uniform": [0.0, 0.1, 0.2, 0.3, 0.4],
    "descending": [10.0, 3.0, 0.5, 0.0, -2.0],
    "constant": [1.0, 1.0, 1.0],
    "repeated": [0.0, 0.0, 1.0, 1.0, 3.0],
    "one": [1.5],
    "unsorted": [3.0, -1.0, 10.0, 0.5],
    "nan_last": [0.0, 1.0, np.nan, np.nan],
    "nan_middle": [0.0, np.nan, 1.0, 3.0],
    "infinite": [-np.inf, 0.0, 3.0, np.inf],
    "zeros": [-0.0, 0.0, 1.0],
}


def _x(name: str) -> Any:
    return jnp.asarray(
        np.concatenate(
            [
                FLOATS,
                np.asarray(BOUNDARIES[name], np.float32),
                np.nextafter(np.asarray(BOUNDARIES[name], np.float32), np.float32(np.inf)),
            ]
        )
    )


@pytest.mark.parametrize("name", BOUNDARIES)
def test_searchsorted_in_constants(name: str) -> None:
    b = np.asarray(BOUNDARIES[name], np.float32)

    def model(t: Any, x: Any) -> Any:
        return {
            f"{side}_{method}": t[jnp.searchsorted(jnp.asarray(b), x, side=side, method=method)]
            for side in ("left", "right")
            for method in ("scan", "compare_all", "scan_unrolled")
        }

    check(model, table(len(b) + 1, 2), _x(name), columns=6)


@pytest.mark.parametrize("boundaries", [[-1e-45, 1e-45, 1.0], [0.0, 1e-40, 2e-40]])
def test_subnormal_boundaries_stay_in_xla(boundaries: list[float]) -> None:
    """XLA folds them at compile time in some methods, and flushes them at run time in others."""
    b = np.asarray(boundaries, np.float32)
    x = jnp.asarray(np.concatenate([FLOATS, b]))

    def model(t: Any, x: Any) -> Any:
        return {
            "searchsorted": t[jnp.searchsorted(b, x)],
            "compare_all": t[jnp.searchsorted(b, x, method="compare_all")],
            "digitize": t[jnp.digitize(x, b)],
            "descending": t[jnp.digitize(x, b[::-1])],
        }

    report = check(
        model, table(4, 2), x, columns=4, calls=None, leaves_while=True, leaves_gather=True
    )
    assert all("search" not in c.ids for c in report.columns)


@pytest.mark.parametrize("side", ["left", "right"])
def test_searches_of_new_sizes_are_traced_once(side: str) -> None:
    """The way that was found last is tried first."""

    def model(params, *ids):
        bags = [jnp.searchsorted(params["splits"], i, side=side) for i in ids]
        return [params["table"][b] for b in bags]

    params = {"splits": jnp.arange(0.0, 40.0, 4.0), "table": jnp.arange(44.0).reshape(11, 4)}
    first = {"left": 31, "right": 51}[side]
    ids = [jnp.arange(float(n)) for n in range(first, first + 10)]
    optimize(model)(params, *ids[:1])
    before = templates._body.cache_info().misses
    got = optimize(model)(params, *ids)
    assert templates._body.cache_info().misses - before == len(ids) - 1
    jax.tree.map(np.testing.assert_array_equal, got, model(params, *ids))


@pytest.mark.parametrize(
    "name", ["ascending", "uniform", "repeated", "one", "infinite", "nan_last", "unsorted"]
)
def test_searchsorted_by_sorting(name: str) -> None:
    b = np.asarray(BOUNDARIES[name], np.float32)

    def model(t: Any, x: Any) -> Any:
        return {
            side: t[jnp.searchsorted(jnp.asarray(b), x, side=side, method="sort")]
            for side in ("left", "right")
        }

    check(model, table(len(b) + 1, 2), _x(name), columns=2, leaves_gather=True, leaves_while=True)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_digitize_in_constants(name: str) -> None:
    b = np.asarray(BOUNDARIES[name], np.float32)

    def model(t: Any, x: Any) -> Any:
        return t[jnp.digitize(x, jnp.asarray(b))], jnp.take(
            t, jnp.digitize(x, b, right=True), axis=0, mode="clip"
        )

    check(model, table(len(b) + 1, 2), _x(name), columns=2, leaves_while=True)


@pytest.mark.parametrize(
    "name", ["ascending", "descending", "unsorted", "nan_middle", "nan_last", "one", "zeros"]
)
def test_buckets_in_arguments(name: str) -> None:
    b = jnp.asarray(np.asarray(BOUNDARIES[name], np.float32))

    def model(t: Any, x: Any, b: Any) -> Any:
        return {
            "left": t[jnp.searchsorted(b, x)],
            "right": t[jnp.searchsorted(b, x, side="right")],
            "all": t[jnp.searchsorted(b, x, method="compare_all")],
            "sort": t[jnp.searchsorted(b, x, side="right", method="sort")],
            "digitize": t[jnp.digitize(x, b)],
            "digitize_right": t[jnp.digitize(x, b, right=True)],
        }

    check(
        model,
        table(b.shape[0] + 1, 2),
        _x(name),
        b,
        columns=6,
        leaves_while=True,
        leaves_gather=True,
    )


def test_buckets_by_comparing_and_counting() -> None:
    b = np.asarray(BOUNDARIES["ascending"], np.float32)
    check(lambda t, x: t[(x[:, None] >= b[None]).sum(-1)], table(8, 3), _x("ascending"), columns=1)


def test_buckets_of_integers_and_of_other_dtypes() -> None:
    def model(t: Any, i: Any, x: Any) -> Any:
        return (
            t[jnp.searchsorted(jnp.array([-3, 0, 4, 9]), i)],
            t[jnp.digitize(i, np.array([-3, 0, 4, 9]))],
            t[jnp.searchsorted(jnp.array([-3, 0, 4, 9]), x)],
            t[jnp.searchsorted(jnp.array([0.5, 3.0]), i)],
            t[jnp.digitize(x.astype(jnp.bfloat16), jnp.array([0.5, 3.0], jnp.bfloat16))],
        )

    check(
        model,
        table(5, 3),
        ids((12,), ROWS, odd=True),
        jnp.asarray(FLOATS),
        leaves_gather=True,
        leaves_while=True,
    )


def test_buckets_in_float64() -> None:
    with jax.enable_x64(True):
        b = np.array([0.1, 0.2, 0.3, 0.7, 1e-300], np.float64)
        b.sort()
        x = np.concatenate([b, np.nextafter(b, 9), np.nextafter(b, -9), [np.nan, np.inf, -0.0]])
        check(
            lambda t, x: (t[jnp.digitize(x, b)], t[jnp.searchsorted(b, x)]),
            table(6, 3),
            jnp.asarray(x),
            columns=2,
        )


def test_buckets_of_a_matrix_column_over_several_fields() -> None:
    grid = np.arange(0, 50, 5, dtype=np.float32)
    x = np.random.default_rng(0).uniform(-10, 60, (13, 5)).astype(np.float32)

    def model(ts: Any, x: Any) -> Any:
        return jnp.concatenate(
            [jnp.take(t, jnp.digitize(x[:, k], grid), axis=0) for k, t in enumerate(ts)], -1
        )

    report = check(model, [table(11, 4, seed=k) for k in range(5)], x, columns=5)
    assert all("uniform-bucketize" in c.rewrites for c in report.columns)


@pytest.mark.parametrize(
    "rewrite",
    ["uniform-bucketize", "merge-searches", "drop-fill", "one-hot-to-lookup", "cast-after-gather"],
)
def test_disabled_rewrites_change_no_result(rewrite: str) -> None:
    def model(t: Any, x: Any, i: Any) -> Any:
        return (
            t[jnp.digitize(x, np.arange(4, dtype=np.float32))],
            t[i % 11],
            jax.nn.one_hot(i, 11) @ t,
            t.astype(jnp.bfloat16)[i],
        )

    report = check(
        model,
        table(ROWS, 3),
        jnp.asarray(FLOATS),
        ids((7,), ROWS, odd=True),
        columns=4,
        calls=None,
        fused={"one-hot-to-lookup": 3, "cast-after-gather": 3}.get(rewrite, 4),
        options=Options(verify=True, disable=(rewrite,)),
    )
    assert all(rewrite not in c.rewrites for c in report.columns)


# ---- one-hot products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", ["finite", "nan", "inf"])
def test_one_hot_products(special: str) -> None:
    t = table(ROWS, DIM)
    if special != "finite":
        t = t.at[4, 2].set(float(special)).at[0, 0].set(-0.0)

    def model(t: Any, i: Any, j: Any) -> Any:
        return {
            "1d": jax.nn.one_hot(i, ROWS) @ t,
            "2d": jax.nn.one_hot(j, ROWS) @ t,
            "einsum": jnp.einsum("br,rd->bd", jax.nn.one_hot(i, ROWS), t),
            "by_hand": (i[:, None] == jnp.arange(ROWS)).astype(t.dtype) @ t,
        }

    check(model, t, ids((8,), ROWS, odd=True), ids((4, 3), ROWS, odd=True), columns=4)


@pytest.mark.parametrize("special", [None, np.nan, np.inf])
def test_multi_hot_products(special: float | None) -> None:
    t = table(ROWS, DIM)
    t = t if special is None else t.at[4, 2].set(special)

    def model(t: Any, j: Any) -> Any:
        return jax.nn.one_hot(j, ROWS).sum(1) @ t

    check(model, t, ids((6, 4), ROWS, odd=True), columns=1, bound=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_hot_of_low_precision_tables(dtype: str) -> None:
    check(
        lambda t, i: jax.nn.one_hot(i, ROWS, dtype=t.dtype) @ t,
        table(ROWS, DIM, dtype),
        ids((8,), ROWS, odd=True),
        columns=1,
    )


def test_one_hot_products_left_alone_are_right() -> None:
    def model(t: Any, i: Any) -> Any:
        return (
            jax.nn.one_hot(i, ROWS, axis=0).T @ t,
            jax.nn.one_hot(i, ROWS) @ t.T[:, :11].T,
            jax.nn.one_hot(i, ROWS, dtype=jnp.int32) @ jnp.ones((ROWS, 2), jnp.int32),
            jax.nn.one_hot(i + 0.0, ROWS) @ t,
            (2.0 * jax.nn.one_hot(i, ROWS)) @ t,
        )

    from helpers import assert_same, run

    args = table(ROWS, DIM), ids((8,), ROWS, odd=True)
    got, _ = run(model, *args)
    assert_same(got, jax.jit(model)(*args), 1e-5)


# ---- fields ------------------------------------------------------------------------------------------------------


def test_one_table_with_an_offset_per_field() -> None:
    sizes = np.array([3, 5, 2, 7])
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
    t = table(int(sizes.sum()), 4)
    x = np.random.default_rng(0).integers(0, 2, (9, 4)).astype(np.int32)

    def model(t: Any, x: Any) -> Any:
        return t[x + offsets], jnp.take(t, (x + jnp.asarray(offsets)[None]) % 17, axis=0).reshape(
            x.shape[0], -1
        )

    check(model, t, x, columns=2)


def test_columns_of_a_batch_matrix() -> None:
    tables = [table(5 + k, 3, seed=k) for k in range(26)]
    x = np.random.default_rng(0).integers(-3, 9, (7, 26)).astype(np.int32)

    def model(ts: Any, x: Any) -> Any:
        return jnp.concatenate([t[x[:, k] % t.shape[0]] for k, t in enumerate(ts)], axis=1)

    check(model, tables, x, columns=26)


@pytest.mark.parametrize(
    "view", ["rows", "strided", "transposed", "reversed", "reshaped", "squeezed", "split"]
)
def test_views_of_a_batch_matrix(view: str) -> None:
    views = {
        "rows": lambda x: x[2:5],
        "strided": lambda x: x[::2, 1::3],
        "transposed": lambda x: x.T[3],
        "reversed": lambda x: x[::-1, ::-1],
        "reshaped": lambda x: x.reshape(-1, 13),
        "squeezed": lambda x: jnp.squeeze(x[:, 3:4], 1),
        "split": lambda x: jnp.split(x, 2, axis=1)[1],
    }

    def model(t: Any, x: Any) -> Any:
        k = views[view](x)
        return t[k], t[k + 1].sum(-2) if k.ndim > 1 else t[k % 3]

    x = np.random.default_rng(1).integers(-20, 20, (6, 26)).astype(np.int32)
    check(model, table(ROWS, 3), x, columns=2, bound=1e-3 if view != "transposed" else None)


def test_quotient_remainder() -> None:
    def model(q: Any, r: Any, i: Any) -> Any:
        return (
            q[i // 10] * r[i % 10],
            jnp.concatenate([q[i // 10], r[i % 10]], -1),
            q[i // 10 % 10] - r[i % 10],
        )

    check(model, table(10, 4), table(10, 4, seed=1), ids((30,), 100, odd=True), columns=6)


def test_elementwise_after_the_lookup() -> None:
    def model(t: Any, i: Any, g: Any) -> Any:
        e = t[i]
        return {
            "scaled": e * 0.5,
            "gated": e * g[:, None],
            "bias": e + 1.0,
            "relu": jnp.maximum(e, 0.0),
            "masked": jnp.where(i[:, None] == 0, 0.0, e),
            "cast": e.astype(jnp.bfloat16),
            "neg": -e,
            "int": e.astype(jnp.int32),
            "positive": e > 0,
            "clip": jnp.clip(e, -1, 1),
            "abs": jnp.abs(e),
        }

    check(model, table(ROWS, DIM), ids((6,), ROWS, odd=True), jnp.arange(6.0), columns=1)


def test_arithmetic_that_xla_computes() -> None:
    """XLA's own results depend on what it fuses (contraction to multiply-add): a few ulp."""

    def model(t: Any, i: Any, g: Any) -> Any:
        e = t[i]
        return e * g[:, None] + 1.0, e / 3.0, jnp.sqrt(jnp.abs(e)), e * e - e, jnp.tanh(e)

    check(
        model,
        table(ROWS, DIM),
        ids((64,), ROWS),
        jnp.linspace(0.1, 9, 64),
        columns=1,
        calls=1,
        bound=2e-5,
    )


REPEATED = {
    "position": lambda t, i: t[jnp.broadcast_to(jnp.arange(i.shape[1]), i.shape)],
    "first": lambda t, i: jnp.take(t, jnp.broadcast_to(i[:, :1], i.shape), axis=0),
    "scaled": lambda t, i: t[jnp.broadcast_to(i[:1], i.shape)] * 0.5,
    "one_hot": lambda t, i: jax.nn.one_hot(jnp.broadcast_to(i[:, 2:3], i.shape), ROWS) @ t,
    "beside": lambda t, i: jnp.concatenate(
        [t[i], t[jnp.broadcast_to(i[:, :1], i.shape)]], -1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_ids_that_are_repeated_along_an_axis(name: str) -> None:
    """The lookup itself grows, so there is no smaller array for XLA to spread."""
    columns = 2 if name == "beside" else 1
    check(REPEATED[name], table(ROWS, 3), ids((6, 4), ROWS, odd=True), columns=columns)


def test_rows_that_are_spread_are_looked_up_once() -> None:
    """Where rows are repeated after the lookup, the call makes the smaller array."""
    fn = lambda t, i: jnp.broadcast_to(t[i][:, None], (6, 9, 3))  # noqa: E731
    f, args = optimize(fn), (table(ROWS, 3), ids((6,), ROWS))
    check(fn, *args, columns=1)
    line = next(x for x in f.lower(*args).as_text().splitlines() if "recom_fused_v1" in x)
    assert line.endswith("tensor<6x1x3xf32>")


def test_empty_batches() -> None:
    def model(t: Any, i: Any, x: Any) -> Any:
        return {
            "take": t[i],
            "bucket": t[jnp.digitize(x, np.array([0.0, 1.0], np.float32))],
            "concat": jnp.concatenate([t[i], t[i % 3]], -1),
            "sum": t[i].sum(0),
        }

    check(model, table(ROWS, 3), ids((0,), ROWS), jnp.zeros((0,)), columns=0, calls=0)
