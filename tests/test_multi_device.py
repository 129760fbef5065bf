"""Eight devices: nothing of tables or inputs is gathered, whether by plain jit or by shard_map, forward or backward.

All in one process of its own, since the number of devices is decided when JAX starts.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parent.parent

PROGRAM = """
import re, warnings
import jax, jax.numpy as jnp, numpy as np
import recom_jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

warnings.simplefilter("ignore")
mesh = jax.make_mesh((8,), ("b",), axis_types=(AxisType.Auto,))
ROWS, DIM, B, L = 64, 4, 32, 3
rng = np.random.default_rng(0)
params = {k: rng.normal(size=(ROWS, DIM)).astype(np.float32) for k in "tu"}
batch = {
    "i": rng.integers(-ROWS, ROWS + 3, B).astype(np.int32),
    "j": rng.integers(-1, ROWS, (B, L)).astype(np.int32),
    "x": rng.normal(size=B).astype(np.float32),
}

def plain(p, b):
    there = b["j"] >= 0
    bag = jnp.where(there[..., None], p["u"][jnp.where(there, b["j"], 0)], 0).sum(1)
    return jnp.concatenate([
        p["t"][b["i"]],
        bag / jnp.maximum(there.sum(1, keepdims=True), 1),
        jnp.take(p["t"], jnp.digitize(b["x"], np.array([0.0, 1.0, 2.0])), axis=0),
        p["u"][(b["i"] * 7 + 3) % ROWS],
    ], -1)

ours = recom_jax.optimize(plain, options=recom_jax.Options(verify=True))
def loss(f):
    return lambda p, b: (jnp.tanh(f(p, b)) ** 2).sum()
def put(tree, spec):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)
def check(name, fn, args, want, reduces, fused):
    compiled = jax.jit(fn).lower(*args).compile()
    text = compiled.as_text()
    count = lambda op: len(re.findall(op + r"(?:-start)?\\(", text))
    for op in ("all-gather", "all-to-all", "collective-permute"):
        assert count(op) == 0, (name, op)
    assert (count("all-reduce") > 0) == reduces, (name, count("all-reduce"))
    assert ("recom_fused_v1" in text) == fused, name
    got = compiled(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name), got, want)
    return got, text

args = put(params, P()), put(batch, P("b"))
forward, gradient = jax.jit(plain)(params, batch), jax.jit(jax.grad(loss(plain)))(params, batch)
out, _ = check("jit", ours, args, forward, False, False)
assert out.sharding.spec == P("b")
check("jit, tables on one device", ours, (params, args[1]), forward, False, False)
check("jit of grad", jax.grad(loss(ours)), args, gradient, True, False)

specs = {"mesh": mesh, "in_specs": (P(), P("b")), "out_specs": P("b")}
check("shard_map", jax.shard_map(ours, **specs), args, forward, False, True)
check("grad of shard_map", jax.grad(loss(jax.shard_map(ours, **specs))), args, gradient, True, True)
both = {**specs, "out_specs": P()}
_, text = check("shard_map of grad", jax.shard_map(jax.grad(loss(ours)), **both), args, gradient, True, True)
assert SUMS_IN_SHARD_MAP == ("recom_row_sums_v1" in text)
def summed(p, b):
    return jax.tree.map(lambda g: jax.lax.psum(g, "b"), jax.grad(loss(ours))(p, b))
apart = jax.shard_map(summed, **both, check_vma=False)
_, text = check("shard_map of grad, own sum", apart, args, gradient, True, True)
assert "recom_row_sums_v1" in text

# Tables in eighths, as for tables that no device holds alone: each device looks its own rows up.
def eighth(p, b):
    first = jax.lax.axis_index("b") * (ROWS // 8)
    i = (b["j"] - first).reshape(-1)
    mine = (i >= 0) & (i < ROWS // 8)
    rows = jnp.where(mine[:, None], p["u"][jnp.where(mine, i, 0)], 0)
    return jax.lax.psum(rows, "b")
def whole(p, b):
    return jnp.where((b["j"] >= 0).reshape(-1, 1), p["u"][b["j"].reshape(-1)], 0)
split = {"mesh": mesh, "in_specs": (P("b", None), P()), "out_specs": P()}
f = jax.shard_map(recom_jax.optimize(eighth), **split)
tables = put(params, P("b", None)), put(batch, P())
check("tables in eighths", f, tables, whole(params, batch), True, True)
found, _ = check("their gradient", jax.grad(loss(f)), tables, jax.grad(loss(whole))(params, batch), True, True)
assert found["u"].sharding.spec == P("b", None) or found["u"].sharding.spec == P("b")

# Arguments on two devices: both are named, also where one is part of the bound tables.
a, b = jax.devices()[3], jax.devices()[2]
away = jax.device_put(params, a), {**batch, "x": jax.device_put(batch["x"], b)}
for run in (lambda: ours(*away), lambda: ours.lower(*away).compile()(*away), lambda: ours.bind(away[0])(away[1])):
    try:
        run()
    except ValueError as why:
        assert isinstance(why, recom_jax.RecomError)
        text = str(why).partition("recom_jax: ")[2]
        where = r"argument p\\['[tu]'\\] of plain is on .*3.*, but argument b\\['x'\\] of plain is on .*2"
        assert re.search(where, text), text
    else:
        raise AssertionError("two devices in one call")
print("fine")
"""


def test_eight_devices(tmp_path: pathlib.Path) -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    code = PROGRAM.replace("SUMS_IN_SHARD_MAP", "True")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | flags,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "fine"
