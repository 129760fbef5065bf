"""The CPU interpreter (csrc/) against numpy and jax.lax, one instruction at a time."""

import concurrent.futures
import hashlib
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from recom_jax import _recom

K = _recom.constants()
OPC, SK, DK = K["opcode"], K["slot_kind"], K["dim_kind"]
SUM, MAX, MIN, PROD = (K["kind"][n] for n in ("SUM", "MAX", "MIN", "PROD"))
NUMPY = {
    "PRED": np.bool_, "S8": np.int8, "S16": np.int16, "S32": np.int32, "S64": np.int64,
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "F16": np.float16,
    "F32": np.float32, "F64": np.float64, "BF16": ml_dtypes.bfloat16,
}
DT = {k: K["dtype"][np.dtype(v).name] for k, v in NUMPY.items()}
NAME_OF = {np.dtype(v): k for k, v in NUMPY.items()}
INTS = ["S8", "S16", "S32", "S64", "U8", "U16", "U32", "U64"]
FLOATS = ["F32", "F64"]
HALVES = ["F16", "BF16"]


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


def bits(value, dtype):
  """An immediate: the value's bits in the low bytes of a word."""
  raw = np.asarray(value).astype(NUMPY[dtype]).tobytes()
  return int(np.frombuffer(raw + bytes(8 - len(raw)), np.int64)[0])


class Builder:
  """One class with one column, unless told otherwise. Values become slots as they are met."""

  def __init__(self, operands, results, outer):
    self.operands, self.results = list(operands), list(results)
    self.dims, self.kinds, self.values, self.regs, self.code = [], [], [], [], []
    self.outer = [self.size(n) for n in outer]

  def slot(self, kind, value):
    self.kinds.append(SK[kind])
    self.values.append(value)
    return len(self.kinds) - 1

  def imm(self, value):
    return self.slot("IMM", value)

  def size(self, n):
    """A dim slot. `n` is a number, or (dim kind, a, b)."""
    kind, a, b = ("const", n, 0) if isinstance(n, (int, np.integer)) else n
    self.dims.append((DK[kind], int(a), int(b)))
    return self.slot("DIM", len(self.dims) - 1)

  def reg(self, dtype, width=None, pos=False):
    self.regs.append((int(pos), DT[dtype], -1 if width is None else self.size(width)))
    return len(self.regs) - 1

  def emit(self, name, *fields, code=None):
    words = [f for x in fields for f in (x if isinstance(x, (list, tuple)) else [x])]
    (self.code if code is None else code).extend([OPC[name], len(words) + 2, *words])

  def strides(self, values):
    return [len(values), *[self.size(s) for s in values]]

  def load(self, dst, operand, strides, offset=0, code=None):
    self.emit("LOAD", dst, self.slot("OPERAND", operand), self.size(offset),
              self.strides(strides), code=code)

  def store(self, src, result, strides, offset=0, feature=1):
    self.emit("STORE", src, self.slot("RESULT", result), self.size(offset),
              self.strides(strides), self.size(feature))

  def take(self, dst, idx, table, stride, base=0, fill=0, flags=0, code=None):
    self.emit("TAKE", flags, dst, idx, self.slot("OPERAND", table), self.size(base),
              self.size(stride), self.imm(fill), code=code)

  def pool(self, kind, dst, idx, table, stride, weight=-1, base=0, fill=0, init=0, flags=0,
           code=None):
    self.emit("POOL", flags, kind, dst, idx, weight, self.slot("OPERAND", table), self.size(base),
              self.size(stride), self.imm(fill), self.imm(init), code=code)

  def region(self, sizes, body):
    self.emit("REGION", self.strides(sizes), len(body), body)

  def jregion(self, total, seg, body):
    self.emit("JREGION", self.size(total), seg, len(body), body)

  def encode(self, columns=None):
    types = [(DT[NAME_OF[np.dtype(a.dtype)]], np.ndim(a)) for a in self.operands]
    outs = [(DT[NAME_OF[np.dtype(a.dtype)]], np.ndim(a)) for a in self.results]
    columns = [self.values] if columns is None else columns
    words = [w for pair in types + outs + self.dims for w in pair]
    words += [len(self.kinds), *self.kinds, len(self.regs), *[w for r in self.regs for w in r]]
    words += [len(self.outer), *self.outer, len(self.code), *self.code]
    for c in columns:
      words += [0, *c]
    head = [K["magic"]["PROGRAM_MAGIC"], K["magic"]["VERSION"], len(words) + 8, len(self.dims),
            len(types), len(outs), 1, len(columns)]
    return np.array(head + words, np.int64).tobytes()

  def run(self, threads=2, program=None):
    binding = np.array([w for i in range(len(self.operands)) for w in (i, -1)], np.int64)
    _recom.run_program(program or self.encode(), binding, self.operands, self.results, threads)
    return self.results


def same(got, want):
  """Equal bits, except that any NaN equals any NaN."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype and got.shape == want.shape
  if got.dtype.kind in "fV" or got.dtype == ml_dtypes.bfloat16:
    g, w = got.astype(np.float64), want.astype(np.float64)
    ok = (np.isnan(g) & np.isnan(w)) | ((g == w) & (np.signbit(g) == np.signbit(w)))
  else:
    ok = got == want
  assert ok.all(), (np.argwhere(~ok)[:5], got[~ok][:5], want[~ok][:5])
