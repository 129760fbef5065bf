#include "row_sums.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "decode.h"
#include "float_mode.h"
#include "interp.h"
#include "kernels.h"

namespace recom {
namespace {

constexpr int64_t kBlockRows = 16;     // neighbouring rows that one thread sums
constexpr int64_t kSmallSums = 16384;  // element additions that one thread does at once
constexpr int64_t kZeroBytes = 1 << 20;
constexpr int64_t kAhead = 8;  // items and bags to prefetch

[[noreturn]] void fail(const std::string& what) { throw ProgramError("recom row sums: " + what); }
void check(bool ok, const char* what) {
  if (!ok) fail(what);
}

struct Table {
  int64_t rows, row_stride;
  std::vector<int> terms;
  int64_t work = 0;
  int64_t buckets = 1;
};

// One lookup. Numbers `*_at` are places in what the program computed, -1 for none.
struct Term {
  int64_t table, ct, base, width, offset, feature, items, bags, inner;
  int64_t row_at, bag_at, weight_at, scale_at, divisor_at, there_at;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (size, stride) of the bags in the cotangent
  bool plain;  // rows of the cotangent are added as they lie there, times at most one number
  std::vector<int32_t> order, starts;  // items by bucket, in order; empty for one bucket
};

struct Sums {
  int64_t n_cts, n_ints, n_floats, n_preds;
  bool wide;
  std::vector<Table> tables;
  std::vector<Term> terms;
};

int64_t elements(const Buffer& b) {
  int64_t n = 1;
  for (int i = 0; i < b.rank; ++i) n *= b.dims[i];
  return n;
}

// `n` numbers from `at` on are inside an array of `size`.
void check_range(int64_t at, int64_t n, int64_t size, bool optional) {
  if (optional && at == -1) return;
  check(at >= 0 && n >= 0 && n <= size && at <= size - n, "numbers outside their array");
}

Sums read_sums(const int64_t* words, int64_t n_words, const std::vector<Buffer>& physical,
               const std::vector<Buffer>& results) {
  decode::Reader r(words, n_words);
  check(!r.done() && r.next() == kSumsMagic, "not a description of sums (bad magic)");
  decode::check_version(r.next(), kSumsVersion, "row sums");
  check(r.next() == n_words, "wrong length");
  Sums s;
  s.wide = r.below(2, "precision");
  s.n_cts = r.below(physical.size() + 1, "cotangents");
  for (int64_t* n : {&s.n_ints, &s.n_floats, &s.n_preds}) {
    *n = r.next();
    check(*n >= 0 && *n <= INT32_MAX, "bad count: numbers");
  }
  const int64_t n_tables = r.count("tables", 2), n_terms = r.count("terms", 16);
  check(n_tables == static_cast<int64_t>(results.size()), "the wrong number of tables");
  for (int64_t i = 0; i < n_tables; ++i) {
    Table t;
    t.rows = r.next();
    t.row_stride = r.next();
    check(t.rows >= 0 && t.rows <= INT32_MAX && t.row_stride >= 0 && t.row_stride <= INT32_MAX,
          "bad table");
    check(t.rows * t.row_stride == elements(results[i]), "a table of another size");
    const int type = s.wide ? dtype::k_F64 : dtype::k_F32;
    check(is_float(results[i].dtype) && kernels().convert[type][results[i].dtype],
          "a table that is not of floats");
    s.tables.push_back(t);
  }
  for (int64_t i = 0; i < n_terms; ++i) {
    Term t;
    t.table = r.below(n_tables, "table");
    t.ct = r.below(s.n_cts, "cotangent");
    for (int64_t* v :
         {&t.base, &t.width, &t.offset, &t.feature, &t.items, &t.bags, &t.inner, &t.row_at,
          &t.bag_at, &t.weight_at, &t.scale_at, &t.divisor_at, &t.there_at}) {
      *v = r.next();
    }
    Table& table = s.tables[t.table];
    check(t.base >= 0 && t.width >= 0 && t.width <= table.row_stride &&
              t.base <= table.row_stride - t.width,
          "columns outside their table");
    check(t.items >= 0 && t.items <= INT32_MAX && t.bags >= 0 && t.bags <= INT32_MAX,
          "bad count: items");
    check(t.inner >= 0 && t.inner <= INT32_MAX, "bad count: positions");
    if (t.bag_at == -1) check(t.items == t.bags * t.inner, "items that are of no bag");
    check_range(t.row_at, t.items, s.n_ints, false);
    check_range(t.bag_at, t.items, s.n_ints, true);
    check_range(t.weight_at, t.items, s.n_floats, true);
    check_range(t.scale_at, t.bags, s.n_floats, true);
    check_range(t.divisor_at, t.bags, s.n_floats, true);
    check_range(t.there_at, t.bags, s.n_preds, true);
    const int64_t n_dims = r.count("dims", 2);
    const Buffer& ct = physical[physical.size() - s.n_cts + t.ct];
    check(is_float(ct.dtype) && kernels().convert[ct.dtype][s.wide ? dtype::k_F64 : dtype::k_F32],
          "a cotangent that is not of floats");
    __int128 low = t.offset, high = t.offset, bags = 1;
    const auto axis = [&](int64_t n, int64_t stride) {
      const __int128 reach = static_cast<__int128>(n - 1) * stride;
      (reach < 0 ? low : high) += reach;
    };
    for (int64_t d = 0; d < n_dims; ++d) {
      const int64_t size = r.next(), stride = r.next();
      check(size >= 0 && size <= INT32_MAX, "bad count: bags");
      bags *= size;
      check(bags <= INT32_MAX, "bad count: bags");
      t.dims.emplace_back(size, stride);
      axis(size, stride);
    }
    check(bags == t.bags, "bags that fill no cotangent");
    if (t.bags > 0 && t.width > 0) {
      axis(t.width, t.feature);
      check(low >= 0 && high < elements(ct), "a cotangent's row outside its buffer");
    }
    t.plain = ct.dtype == (s.wide ? dtype::k_F64 : dtype::k_F32) && t.divisor_at < 0 &&
              (t.feature == 1 || t.width == 1) && n_dims <= 1;
    table.work += t.items * std::max<int64_t>(t.width, 8);
    table.terms.push_back(static_cast<int>(i));
    s.terms.push_back(std::move(t));
  }
  check(r.done(), "words after the last term");
  return s;
}

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
  if (n == 1) return;
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

// A bucket of a table of the type that sums are made in: right into the result.
template <class C>
void sum_in_place(const Call& c, int64_t table, int64_t bucket) {
  const Table& t = c.sums.tables[table];
  C* base = static_cast<C*>(c.results[table].data);
  std::vector<char> temp;
  for (int i : t.terms) {
    const Term& term = c.sums.terms[i];
    if (term.width == 0) continue;
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

template <class C>
void sum_bucket(const Call& c, int64_t table, int64_t bucket) {
  constexpr int kType = sizeof(C) == 8 ? dtype::k_F64 : dtype::k_F32;
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

  struct Chunk {
    int64_t table, at;
  };
  std::vector<Chunk> zeros, chunks;
  for (size_t i = 0; i < s.tables.size(); ++i) {
    const int64_t n = elements(results[i]) * element_size(results[i].dtype);
    for (int64_t at = 0; at < n; at += kZeroBytes) zeros.push_back({static_cast<int64_t>(i), at});
    for (int64_t b = 0; b < s.tables[i].buckets; ++b)
      chunks.push_back({static_cast<int64_t>(i), b});
  }
  const Call call{s,
                  kernels(),
                  physical.data() + (physical.size() - s.n_cts),
                  results,
                  static_cast<const int32_t*>(made[0]),
                  made[1],
                  static_cast<const uint8_t*>(made[2])};
  const int64_t n_zeros = zeros.size();
  parallel_for(ex, n_zeros + static_cast<int64_t>(s.terms.size()), [&](int64_t i) {
    if (i >= n_zeros) return sort_items(call, &s.terms[i - n_zeros]);
    const Buffer& b = results[zeros[i].table];
    const int64_t n = elements(b) * element_size(b.dtype) - zeros[i].at;
    std::memset(static_cast<char*>(b.data) + zeros[i].at, 0, std::min(n, kZeroBytes));
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
