#include "exec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "prefetch.h"

namespace recom {
namespace {

int64_t wrap_mul(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
int64_t wrap_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

// Calls f(first item, offset, stride, length) for runs of evenly spaced items that together are
// items [start, start + count) of the merged dims at w (see plan.cc).
template <class F>
void walk(const int64_t* w, int64_t start, int64_t count, const F& f) {
  const int64_t n = w[0];
  if (n <= 1) {
    const int64_t stride = n == 0 ? 0 : w[2];
    f(int64_t{0}, wrap_mul(start, stride), stride, count);
    return;
  }
  const int64_t inner = w[2 * n - 1], stride = w[2 * n];
  for (int64_t done = 0; done < count;) {
    const int64_t at = start + done;
    int64_t rest = at / inner, offset = wrap_mul(at % inner, stride);
    for (int64_t i = n - 2; i >= 0; --i) {
      offset = wrap_add(offset, wrap_mul(rest % w[1 + 2 * i], w[2 + 2 * i]));
      rest /= w[1 + 2 * i];
    }
    const int64_t len = std::min(inner - at % inner, count - done);
    f(done, offset, stride, len);
    done += len;
  }
}

void set_nan(void* p, int t) {
  if (t == dtype::k_F64) {
    const double v = std::numeric_limits<double>::quiet_NaN();
    std::memcpy(p, &v, 8);
  } else if (t == dtype::k_F32) {
    const float v = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(p, &v, 4);
  } else if (is_float8(t)) {
    *static_cast<uint8_t*>(p) = t == dtype::k_F8E5M2 ? 0x7e : 0x7f;
  } else {
    const uint16_t v = t == dtype::k_F16 ? 0x7e00 : 0x7fc0;
    std::memcpy(p, &v, 2);
  }
}

}  // namespace

void Exec::column(const Plan::Col& col, int64_t bag0, int64_t bag1) {
  col_ = &col;
  starts_.clear();
  for (int64_t b = bag0; b < bag1; b += col.tile) {
    bag0_ = b;
    bags_ = std::min(col.tile, bag1 - b);
    run(0, col.cls->ops.size(), bag0_, bags_);
  }
}

void Exec::prefetch_inputs(const Plan::Col& col, int64_t bag, int64_t bags) const {
  for (const Op& o : col.cls->ops) {
    if (o.op != opcode::k_LOAD || o.pos) continue;
    const Register& g = col.cls->regs[o.dst];
    const int64_t* w = col.v + o.words;
    // Elements that lie apart are of a matrix, whose lines neighbouring columns share.
    if (g.width_slot >= 0 || w[0] != 1 || w[2] != 1) continue;
    const char* base = static_cast<const char*>(operands_[col.v[o.buffer]].data);
    prefetch(base + (col.v[o.offset] + bag) * g.size, bags * g.size);
  }
}

void Exec::columns(const Plan::Col* cols, int n, const Plan::Col* end, int64_t bag0, int64_t bag1) {
  constexpr int kMost = kGroupBytes / 16, kRowBytes = 128;  // rows are of 16 to 128 bytes
  constexpr int kColumnsAhead = 4;
  const char* rows[kMost * kGroupTile];
  alignas(64) char fills[kMost][kRowBytes];
  alignas(64) static const char zeros[kRowBytes] = {};
  int64_t bytes = 0;
  for (int64_t b = bag0; b < bag1; b += kGroupTile) {
    bag0_ = b;
    bags_ = std::min(kGroupTile, bag1 - b);
    const int64_t after = b + bags_, bags_after = std::min(kGroupTile, bag1 - after);
    for (int i = 0; i < n; ++i) {
      const int next = i + kColumnsAhead;
      if (next < n) {
        prefetch_inputs(cols[next], b, bags_);
      } else if (bags_after > 0) {
        if (next < 2 * n) prefetch_inputs(cols[next - n], after, bags_after);
      } else if (next < end - cols) {
        prefetch_inputs(cols[next], bag0, std::min(kGroupTile, bag1 - bag0));
      }
      col_ = cols + i;
      const int at = col_->cls->plain_take;
      const Op& o = col_->cls->ops[at];
      const TableRef t = table(o);
      const int64_t size = info(o.dst).size;
      bytes = t.width * size;
      // Rows come while the other columns' ids are computed. The whole of a small table is fewer
      // lines than its rows one by one, and in order.
      const bool small =
          t.row_stride == t.width && t.limit <= 4 * bags_ && t.limit * bytes <= 64 * bags_;
      if (small) prefetch(t.base, t.limit * bytes);
      run(0, at, bag0_, bags_);
      if (b == bag0) k_.fill[size](fills[i], t.fill, t.width);
      const char** to = rows + i * kGroupTile;
      bad_index_ |=
          !k_.row_pointers(t, t.row_stride * size, reinterpret_cast<const int64_t*>(reg_[o.a]),
                           fills[i], zeros, to, bags_);
      for (int64_t k = 0; k < bags_ && !small; ++k) prefetch(to[k], bytes);
    }
    col_ = cols;
    const Op& first = col_->cls->ops[col_->cls->plain_take];
    const Dest d = destination(first);
    const auto* write = col_->stream ? k_.stream_rows : k_.copy_rows;
    write[bytes == 16   ? 0
          : bytes == 32 ? 1
          : bytes == 64 ? 2
                        : 3](rows, kGroupTile, n, d.base, d.pitch * info(first.dst).size, bags_);
  }
}

void Exec::run(int begin, int end, int64_t start, int64_t count) {
  const auto& ops = col_->cls->ops;
  for (int i = begin; i < end;) {
    const Op& o = ops[i];
    if (o.op == opcode::k_REGION) {
      region(o, i);
      i = o.body_end;
    } else if (o.op == opcode::k_JREGION) {
      jagged(o, i);
      i = o.body_end;
    } else {
      step(o, start, count);
      ++i;
    }
  }
}

void Exec::step(const Op& o, int64_t start, int64_t count) {
  const int64_t* v = col_->v;
  switch (o.op) {
    case opcode::k_LOAD:
      return load(o, start, count);
    case opcode::k_AFFINE:
      return affine(o, start, count);
    case opcode::k_CONST:
      if (info(o.dst).uniform) return;
      return k_.fill[info(o.dst).size](own(o.dst), &v[o.fill], count * width(o.dst));
    case opcode::k_EXPAND:
      return expand(o, start, count);
    case opcode::k_UNARY: {
      const char* a = reg_[o.a];
      return k_.unary[o.sub][info(o.a).dtype](own(o.dst), a, count * width(o.dst));
    }
    case opcode::k_BINARY:
      return binary_op(o, count);
    case opcode::k_SELECT:
      return select(o, count);
    case opcode::k_CONVERT: {
      const char* a = reg_[o.a];
      return k_.convert[info(o.a).dtype][info(o.dst).dtype](own(o.dst), a, count * width(o.dst));
    }
    case opcode::k_BITCAST: {
      const char* a = reg_[o.a];
      std::memmove(own(o.dst), a, count * width(o.dst) * info(o.dst).size);
      return;
    }
    case opcode::k_SEARCH: {
      if (by_bags(o)) return bag_of(o, count);
      const Register& x = info(o.a);
      const Buffer& b = operands_[v[o.buffer]];
      return k_.search[o.sub][x.dtype](reinterpret_cast<int32_t*>(own(o.dst)), reg_[o.a],
                                       static_cast<const char*>(b.data) + v[o.offset] * x.size,
                                       v[o.n], o.side, count);
    }
    case opcode::k_SEARCH_UNIFORM:
      return k_.uniform[info(o.a).dtype](reinterpret_cast<int32_t*>(own(o.dst)), reg_[o.a],
                                         v[o.fill], v[o.init], v[o.n], o.side, count);
    case opcode::k_INDEX: {
      const char* a = reg_[o.a];
      return k_.index[o.sub][info(o.a).dtype](reinterpret_cast<int64_t*>(own(o.dst)), a, v[o.n],
                                              count);
    }
    case opcode::k_PREDICATE: {
      const char *a = reg_[o.a], *b = reg_[o.b];
      return k_.predicate(reinterpret_cast<int64_t*>(own(o.dst)),
                          reinterpret_cast<const int64_t*>(a), reinterpret_cast<const uint8_t*>(b),
                          count);
    }
    case opcode::k_TAKE:
      return take(o, count);
    case opcode::k_POOL:
    case opcode::k_ACC:
      return reduce(o, start, count);
    case opcode::k_STORE:
      return store(o);
  }
}

void Exec::load(const Op& o, int64_t start, int64_t count) {
  const int64_t* v = col_->v;
  const Register& g = info(o.dst);
  const int64_t *w = v + o.words, size = g.size, d = width(o.dst);
  const bool row = g.width_slot >= 0;
  const char* base = static_cast<const char*>(operands_[v[o.buffer]].data) + v[o.offset] * size;
  const int64_t step = row ? d : 1, feature = row ? v[o.feature] : 1;
  const bool dense = feature == 1 || d == 1;
  if (w[0] <= 1 && dense && (w[0] == 1 ? w[2] : 0) == step) {
    reg_[o.dst] = const_cast<char*>(base) + start * step * size;  // no copy
    return;
  }
  char* out = own(o.dst);
  walk(w, start, count, [&](int64_t first, int64_t offset, int64_t stride, int64_t len) {
    char* to = out + first * step * size;
    const char* from = base + offset * size;
    if (!row) {
      if (stride == 0) return k_.fill[size](to, from, len);
      return k_.strided[size](to, 1, from, stride, len);
    }
    for (int64_t i = 0; i < len; ++i) {
      k_.strided[size](to + i * d * size, 1, from + i * stride * size, feature, d);
    }
  });
}

void Exec::affine(const Op& o, int64_t start, int64_t count) {
  const int t = info(o.dst).dtype;
  char* out = own(o.dst);
  auto* ints = reinterpret_cast<int64_t*>(t == dtype::k_S64 ? out : temp(0));
  walk(col_->v + o.words, start, count,
       [&](int64_t first, int64_t offset, int64_t stride, int64_t len) {
         k_.affine(ints + first, wrap_add(col_->v[o.offset], offset), stride, len);
       });
  if (t != dtype::k_S64) k_.convert[dtype::k_S64][t](out, ints, count);
}

void Exec::expand(const Op& o, int64_t start, int64_t count) {
  const Register& g = info(o.dst);
  const int64_t d = width(o.dst), bytes = d * g.size;
  const char* src = reg_[o.a];
  char* out = own(o.dst);
  int64_t bag = start / inner_ - bag0_, left = inner_ - start % inner_;
  for (int64_t done = 0; done < count; ++bag, left = inner_) {
    const int64_t n = std::min(left, count - done);
    if (g.width_slot < 0) {
      k_.fill[g.size](out + done * bytes, src + bag * bytes, n);
    } else {
      for (int64_t i = 0; i < n; ++i)
        std::memcpy(out + (done + i) * bytes, src + bag * bytes, bytes);
    }
    done += n;
  }
}

const char* Exec::spread(int r, int dst, int64_t count, int slot) {
  if (info(dst).width_slot < 0 || info(r).width_slot >= 0) return reg_[r];
  const int64_t d = width(dst), size = info(r).size;
  char* out = temp(slot);
  for (int64_t i = 0; i < count; ++i) k_.fill[size](out + i * d * size, reg_[r] + i * size, d);
  return out;
}

void Exec::binary_op(const Op& o, int64_t count) {
  const int t = info(o.a).dtype;
  const int64_t n = count * width(o.dst);
  const char* a = spread(o.a, o.dst, count, 0);
  if (info(o.b).uniform) {
    // A CONST register that nothing else reads: the immediate is in the column's values.
    const Op& c = col_->cls->ops[info(o.b).writer];
    return k_.binary_imm[o.sub][t](own(o.dst), a, &col_->v[c.fill], n);
  }
  const char* b = spread(o.b, o.dst, count, 1);
  k_.binary[o.sub][t](own(o.dst), a, b, n);
}

void Exec::select(const Op& o, int64_t count) {
  const char* p = spread(o.a, o.dst, count, 0);
  const char* f = spread(o.b, o.dst, count, 1);
  const char* t = spread(o.c, o.dst, count, 2);
  k_.select[info(o.dst).size](own(o.dst), reinterpret_cast<const uint8_t*>(p), f, t,
                              count * width(o.dst));
}

TableRef Exec::table(const Op& o) {
  const int64_t* v = col_->v;
  const Buffer& b = operands_[v[o.buffer]];
  const char* base = static_cast<const char*>(b.data);
  const int64_t limit = v[o.words];
  // With no row inside, the base may be anywhere; it is not used.
  if (limit > 0 && width(o.dst) > 0) base += v[o.offset] * element_size(b.dtype);
  return {base, v[o.n], limit, width(o.dst), &v[o.fill]};
}

Exec::Dest Exec::destination(const Op& o) {
  const int64_t* v = col_->v;
  if (o.fuse_store >= 0 && v[o.words + 1]) {
    const Op& s = col_->cls->ops[o.fuse_store];
    const int64_t* w = v + s.words;
    const int64_t pitch = w[0] == 0 ? 0 : w[2];
    char* base = static_cast<char*>(results_[v[s.buffer]].data);
    // An empty row may lie anywhere: its address must not be computed.
    if (width(o.dst) > 0) base += (v[s.offset] + bag0_ * pitch) * info(o.dst).size;
    return {base, pitch};
  }
  return {own(o.dst), width(o.dst)};
}

void Exec::take(const Op& o, int64_t count) {
  const TableRef t = table(o);
  const Register& g = info(o.dst);
  auto* idx = reinterpret_cast<const int64_t*>(reg_[o.a]);
  const Dest d = destination(o);
  if (t.width == 0) return;
  const int table_type = operands_[col_->v[o.buffer]].dtype;
  bad_index_ |= !k_.take[table_type][g.dtype](t, idx, d.base, d.pitch, count);
  if (!(o.flags & flag::k_ONE_HOT) || !is_float(g.dtype)) return;
  // As a dot would have it: no -0, and NaN wherever a row that was not selected is not finite.
  const int64_t scan = col_->v[o.words + 2];
  const NonFinite* bad = scan >= 0 && scans_[scan].any ? &scans_[scan] : nullptr;
  const int tab_size = element_size(table_type);
  for (int64_t i = 0; i < count; ++i) {
    char* row = d.base + i * d.pitch * g.size;
    k_.canonical_zero[g.dtype](row, row, t.width);
    if (!bad || idx[i] == -2) continue;
    const bool inside = static_cast<uint64_t>(idx[i]) < static_cast<uint64_t>(t.limit);
    for (int64_t j = 0; j < t.width; ++j) {
      int64_t n = bad->per_feature[j];
      if (n == 0) continue;
      if (inside) {
        n -= k_.any_non_finite[table_type](
            static_cast<const char*>(t.base) + (idx[i] * t.row_stride + j) * tab_size, 1);
      }
      if (n > 0) set_nan(row + j * g.size, g.dtype);
    }
  }
}

void Exec::store(const Op& o) {
  const int64_t* v = col_->v;
  if (o.fused_from >= 0 && v[col_->cls->ops[o.fused_from].words + 1]) return;  // already written
  const Register& g = info(o.a);
  const Buffer& result = results_[v[o.buffer]];
  const int64_t d = width(o.a), size = element_size(result.dtype);
  const bool row = g.width_slot >= 0;
  if (d == 0) return;
  const char* src = reg_[o.a];
  if (result.dtype != g.dtype) {
    char* narrow = temp(0);
    k_.convert[g.dtype][result.dtype](narrow, src, bags_ * d);
    src = narrow;
  }
  char* base = static_cast<char*>(result.data) + v[o.offset] * size;
  walk(v + o.words, bag0_, bags_, [&](int64_t first, int64_t offset, int64_t stride, int64_t len) {
    const char* from = src + first * d * size;
    char* to = base + offset * size;
    if (!row || d == 1) return k_.strided[size](to, stride, from, 1, len);
    for (int64_t i = 0; i < len; ++i, from += d * size, to += stride * size) {
      if (v[o.feature] == 1)
        std::memcpy(to, from, d * size);
      else
        k_.strided[size](to, v[o.feature], from, 1, d);
    }
  });
}

}  // namespace recom
