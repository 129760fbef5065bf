#include "row_sums.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "float_mode.h"
#include "interp.h"
#include "kernels.h"
#include "row_sums_words.h"

namespace recom {
namespace {

using namespace sums;  // NOLINT(build/namespaces)

constexpr int64_t kBlockRows = 16;     // neighbouring rows that one thread sums
constexpr int64_t kSmallSums = 16384;  // element additions that one thread does at once
constexpr int64_t kZeroBytes = 1 << 20;
constexpr int64_t kAhead = 8;  // items and bags to prefetch

// What a chunk of work needs of the call.
struct Call {
  const Sums& sums;
  const Kernels& k;
  const Buffer* cts;
  const std::vector<Buffer>& results;
  const int32_t* ints;
  const void* floats;
  const uint8_t* preds;
};

// Which bag an item is of, or -1.
inline int64_t bag_of(const Call& c, const Term& t, int64_t item) {
  if (t.bag_at < 0)
    return t.inner == 1 ? item : static_cast<uint32_t>(item) / static_cast<uint32_t>(t.inner);
  const int64_t bag = c.ints[t.bag_at + item];
  return bag < t.bags ? bag : -1;
}

// The row that an item adds to, or -1: none, outside, or of a bag that does not count.
inline int64_t row_of(const Call& c, const Term& t, int64_t rows, int64_t item) {
  const int64_t row = c.ints[t.row_at + item];
  if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(rows)) return -1;
  if (t.bag_at < 0 && t.there_at < 0) return row;
  const int64_t bag = bag_of(c, t, item);
  if (bag < 0 || (t.there_at >= 0 && !c.preds[t.there_at + bag])) return -1;
  return row;
}

inline int64_t bucket_of(int64_t row, int64_t buckets) { return row / kBlockRows & (buckets - 1); }

// Items of a term by bucket: a counting sort, which keeps their order.
void sort_items(const Call& c, Term* t) {
  const Table& table = c.sums.tables[t->table];
  const int64_t n = table.buckets;
  t->starts.assign(n + 1, 0);
  t->order.resize(t->items);
  for (int64_t i = 0; i < t->items; ++i) {
    const int64_t row = row_of(c, *t, table.rows, i);
    if (row >= 0) ++t->starts[bucket_of(row, n) + 1];
  }
  for (int64_t b = 0; b < n; ++b) t->starts[b + 1] += t->starts[b];
  std::vector<int32_t> at(t->starts.begin(), t->starts.end() - 1);
  for (int64_t i = 0; i < t->items; ++i) {
    const int64_t row = row_of(c, *t, table.rows, i);
    if (row >= 0) t->order[at[bucket_of(row, n)]++] = static_cast<int32_t>(i);
  }
}

// Calls f(row, item) for the items of a bucket, in their order; `near(row, item)` some items
// before.
template <class Near, class F>
void each(const Call& c, const Term& t, int64_t bucket, const Near& near, const F& f) {
  const Table& table = c.sums.tables[t.table];
  if (table.buckets == 1) {
    for (int64_t i = 0; i < t.items; ++i) {
      if (i + kAhead < t.items) {
        const int64_t next = c.ints[t.row_at + i + kAhead];
        if (next >= 0 && next < table.rows) near(next, i + kAhead);
      }
      const int64_t row = row_of(c, t, table.rows, i);
      if (row >= 0) f(row, i);
    }
    return;
  }
  const int32_t* items = t.order.data();
  for (int64_t j = t.starts[bucket], end = t.starts[bucket + 1]; j < end; ++j) {
    if (j + kAhead < end) near(c.ints[t.row_at + items[j + kAhead]], items[j + kAhead]);
    f(int64_t{c.ints[t.row_at + items[j]]}, int64_t{items[j]});
  }
}

template <class C>
void add_row(C* __restrict to, const C* __restrict g, int64_t width, bool scaled, C scale) {
  if (!scaled) {
    for (int64_t j = 0; j < width; ++j) to[j] += g[j];
  } else {
    for (int64_t j = 0; j < width; ++j) to[j] += g[j] * scale;
  }
}

// The row of the cotangent of a bag, where it is `plain`.
template <class C>
const C* plain_row(const Call& c, const Term& t, int64_t bag) {
  return static_cast<const C*>(c.cts[t.ct].data) + t.offset +
         (t.dims.empty() ? 0 : bag * t.dims[0].second);
}

// Adds an item's row of the cotangent, times its numbers, to `to`. `temp` holds two rows.
template <class C>
void add_item(const Call& c, const Term& t, int64_t item, C* to, char* temp) {
  constexpr int kType = sizeof(C) == 8 ? dtype::k_F64 : dtype::k_F32;
  const int64_t bag = bag_of(c, t, item);
  const C* floats = static_cast<const C*>(c.floats);
  const bool scaled = t.weight_at >= 0 || t.scale_at >= 0;
  C scale = t.weight_at >= 0 ? floats[t.weight_at + item] : C(1);
  if (t.scale_at >= 0) scale *= floats[t.scale_at + bag];
  const Buffer& ct = c.cts[t.ct];
  if (t.plain) {
    return add_row(to, plain_row<C>(c, t, bag), t.width, scaled, scale);
  }
  int64_t place = t.offset, rest = bag;
  for (size_t d = t.dims.size(); d-- > 0;) {
    if (d == 0) {
      place += rest * t.dims[0].second;
    } else {
      place += rest % t.dims[d].first * t.dims[d].second;
      rest /= t.dims[d].first;
    }
  }
  const int64_t size = element_size(ct.dtype);
  const char* from = static_cast<const char*>(ct.data) + place * size;
  char *first = temp, *second = temp + t.width * 8;
  if (t.feature != 1 && t.width > 1) {
    c.k.strided[size](first, 1, from, t.feature, t.width);
    from = first;
  }
  if (ct.dtype != kType) {
    c.k.convert[ct.dtype][kType](second, from, t.width);
    from = second;
  }
  const C* g = reinterpret_cast<const C*>(from);
  if (t.divisor_at >= 0) {
    // In place where the row is a copy already.
    C* quotients = reinterpret_cast<C*>(from == second ? first : second);
    const C divisor = floats[t.divisor_at + bag];
    for (int64_t j = 0; j < t.width; ++j) quotients[j] = g[j] / divisor;
    g = quotients;
  }
  add_row(to, g, t.width, scaled, scale);
}

// Adds rows of the cotangent as they lie there to rows of the gradient, bag by bag: what
// `add_item` does for each item, in the same order, with the bag's part done once. `kWidth` is the
// term's width, 0 for any.
template <class C, int kWidth>
void add_bags(const Call& c, const Table& table, const Term& t, C* base) {
  const int32_t* rows = c.ints + t.row_at;
  const C* floats = static_cast<const C*>(c.floats);
  const int64_t width = kWidth > 0 ? kWidth : t.width;
  const bool scaled = t.weight_at >= 0 || t.scale_at >= 0;
  for (int64_t bag = 0, item = 0; bag < t.bags; ++bag) {
    const int64_t end = item + t.inner;
    if (t.there_at >= 0 && !c.preds[t.there_at + bag]) {
      item = end;
      continue;
    }
    const C* g = plain_row<C>(c, t, bag);
    const C scale = t.scale_at >= 0 ? floats[t.scale_at + bag] : C(1);
    for (; item < end; ++item) {
      if (item + kAhead < t.items) {
        const uint64_t next = static_cast<uint32_t>(rows[item + kAhead]);
        if (next < static_cast<uint64_t>(table.rows))
          __builtin_prefetch(base + next * table.row_stride, 1);
      }
      const uint64_t row = static_cast<uint32_t>(rows[item]);  // -1 is larger than any
      if (row >= static_cast<uint64_t>(table.rows)) continue;
      const C factor = t.weight_at >= 0 ? floats[t.weight_at + item] * scale : scale;
      add_row(base + row * table.row_stride, g, width, scaled, factor);
    }
  }
}

template <class C>
void add_bags(const Call& c, const Table& table, const Term& t, C* base) {
  switch (t.width) {
    case 4:
      return add_bags<C, 4>(c, table, t, base);
    case 8:
      return add_bags<C, 8>(c, table, t, base);
    case 16:
      return add_bags<C, 16>(c, table, t, base);
    case 32:
      return add_bags<C, 32>(c, table, t, base);
    case 64:
      return add_bags<C, 64>(c, table, t, base);
    default:
      return add_bags<C, 0>(c, table, t, base);
  }
}

// A bucket of a table of the type that sums are made in: right into the result.
template <class C>
void sum_in_place(const Call& c, int64_t table, int64_t bucket) {
  const Table& t = c.sums.tables[table];
  C* base = static_cast<C*>(c.results[table].data);
  std::vector<char> temp;
  for (int i : t.terms) {
    const Term& term = c.sums.terms[i];
    if (term.width == 0) continue;
    if (t.buckets == 1 && term.plain && term.bag_at < 0) {
      add_bags<C>(c, t, term, base + term.base);
      continue;
    }
    if (temp.size() < static_cast<size_t>(16 * term.width)) temp.resize(16 * term.width);
    each(
        c, term, bucket,
        [&](int64_t row, int64_t item) {
          __builtin_prefetch(base + row * t.row_stride + term.base, 1);
          if (!term.plain) return;
          // Some bags ahead, however many items a bag has.
          const int64_t bag = bag_of(c, term, item) + (term.bag_at < 0 ? kAhead : 0);
          if (bag >= 0 && bag < term.bags) __builtin_prefetch(plain_row<C>(c, term, bag));
        },
        [&](int64_t row, int64_t item) {
          add_item<C>(c, term, item, base + row * t.row_stride + term.base, temp.data());
        });
  }
}

// A bucket of any other table: sorted by row, each row is summed apart and rounded once.
template <class C>
void sum_sorted(const Call& c, int64_t table, int64_t bucket) {
  constexpr int kType = sizeof(C) == 8 ? dtype::k_F64 : dtype::k_F32;
  struct Entry {
    int32_t row, term, item;
  };
  const Table& t = c.sums.tables[table];
  std::vector<Entry> entries;
  int64_t width = 0;
  for (int i : t.terms) {
    const Term& term = c.sums.terms[i];
    width = std::max(width, term.width);
    each(
        c, term, bucket, [](int64_t, int64_t) {},
        [&](int64_t row, int64_t item) {
          entries.push_back({static_cast<int32_t>(row), i, static_cast<int32_t>(item)});
        });
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.row < b.row; });
  const Buffer& result = c.results[table];
  const int64_t bytes = t.row_stride * element_size(result.dtype);
  std::vector<C> row(t.row_stride);
  std::vector<char> temp(16 * width);
  for (size_t i = 0; i < entries.size();) {
    const int32_t at = entries[i].row;
    std::fill(row.begin(), row.end(), C(0));
    for (; i < entries.size() && entries[i].row == at; ++i) {
      const Term& term = c.sums.terms[entries[i].term];
      if (term.width > 0) {
        add_item<C>(c, term, entries[i].item, row.data() + term.base, temp.data());
      }
    }
    c.k.convert[kType][result.dtype](static_cast<char*>(result.data) + at * bytes, row.data(),
                                     t.row_stride);
  }
}

// Bytes of a table's gradient.
int64_t bytes_of(const Call& c, int64_t table) {
  const Buffer& b = c.results[table];
  return elements(b) * element_size(b.dtype);
}

// Whether the thread that sums a table's rows zeroes them, too: then they are in its caches.
bool zeroed_with_sums(const Call& c, int64_t table) {
  return c.sums.tables[table].buckets == 1 && bytes_of(c, table) <= kZeroBytes;
}

template <class C>
void sum_bucket(const Call& c, int64_t table, int64_t bucket) {
  constexpr int kType = sizeof(C) == 8 ? dtype::k_F64 : dtype::k_F32;
  if (zeroed_with_sums(c, table)) {
    std::memset(c.results[table].data, 0, bytes_of(c, table));
  }
  if (c.results[table].dtype == kType) {
    sum_in_place<C>(c, table, bucket);
  } else {
    sum_sorted<C>(c, table, bucket);
  }
}

// How many buckets a table's rows are dealt to: a power of two, a few for each thread; one where
// there is work enough in other tables.
int64_t buckets_of(const Table& t, int64_t work, int threads) {
  if (threads <= 1 || t.work < 2 * kSmallSums || t.work < work / (2 * threads)) return 1;
  const int64_t most = std::min<int64_t>({threads * 4, t.rows / kBlockRows, t.work / kSmallSums});
  int64_t n = 1;
  while (n * 2 <= most) n *= 2;
  return n;
}

}  // namespace

void run_row_sums(const Program& numbers, const std::vector<Buffer>& physical,
                  const std::vector<Buffer>& results, const int64_t* binding, int64_t n_binding,
                  const int64_t* words, int64_t n_words, const Executor& executor) {
  Sums s = read_sums(words, n_words, physical, results);
  // The numbers: memory of this call's own.
  const int64_t lengths[3] = {s.n_ints, s.n_floats, s.n_preds};
  const int types[3] = {dtype::k_S32, s.wide ? dtype::k_F64 : dtype::k_F32, dtype::k_PRED};
  std::unique_ptr<char[]> memory[3];
  const void* made[3];
  std::vector<Buffer> scratch;
  for (int i = 0; i < 3; ++i) {
    memory[i].reset(new char[lengths[i] * element_size(types[i]) + 64]);
    char* base = memory[i].get();
    base += (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
    made[i] = base;
    scratch.push_back({base, &lengths[i], 1, types[i]});
  }
  run_program(numbers, {physical.begin(), physical.end() - s.n_cts}, scratch, binding, n_binding,
              executor);

  int64_t work = 0, bytes = 0;
  for (size_t i = 0; i < s.tables.size(); ++i) {
    work += s.tables[i].work;
    bytes += elements(results[i]) * element_size(results[i].dtype);
  }
  const Executor alone;
  const Executor& ex = work < kSmallSums && bytes < kZeroBytes ? alone : executor;
  for (Table& t : s.tables) t.buckets = buckets_of(t, work, ex.threads);

  const Call call{s,
                  kernels(),
                  physical.data() + (physical.size() - s.n_cts),
                  results,
                  static_cast<const int32_t*>(made[0]),
                  made[1],
                  static_cast<const uint8_t*>(made[2])};
  struct Chunk {
    int64_t table, at;
  };
  std::vector<Chunk> zeros, chunks;
  std::vector<int> sorts;
  for (int64_t i = 0; i < static_cast<int64_t>(s.tables.size()); ++i) {
    const Table& t = s.tables[i];
    if (!zeroed_with_sums(call, i)) {
      for (int64_t at = 0; at < bytes_of(call, i); at += kZeroBytes) zeros.push_back({i, at});
    }
    for (int64_t b = 0; b < t.buckets; ++b) chunks.push_back({i, b});
    if (t.buckets > 1) sorts.insert(sorts.end(), t.terms.begin(), t.terms.end());
  }
  const int64_t n_zeros = zeros.size();
  parallel_for(ex, n_zeros + static_cast<int64_t>(sorts.size()), [&](int64_t i) {
    if (i >= n_zeros) return sort_items(call, &s.terms[sorts[i - n_zeros]]);
    char* data = static_cast<char*>(results[zeros[i].table].data) + zeros[i].at;
    std::memset(data, 0, std::min(bytes_of(call, zeros[i].table) - zeros[i].at, kZeroBytes));
  });
  const FloatMode mode;
  parallel_for(ex, chunks.size(), [&](int64_t i) {
    const FloatMode::Scope scope(mode);
    if (s.wide) {
      sum_bucket<double>(call, chunks[i].table, chunks[i].at);
    } else {
      sum_bucket<float>(call, chunks[i].table, chunks[i].at);
    }
  });
  ++stats().row_sums;
}

}  // namespace recom
