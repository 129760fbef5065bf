#include "row_sums_words.h"

#include <algorithm>
#include <string>

#include "decode.h"
#include "kernels.h"

namespace recom {
namespace sums {
namespace {

[[noreturn]] void fail(const std::string& what) { throw ProgramError("recom row sums: " + what); }
void check(bool ok, const char* what) {
  if (!ok) fail(what);
}

// `n` numbers from `at` on are inside an array of `size`.
void check_range(int64_t at, int64_t n, int64_t size, bool optional) {
  if (optional && at == -1) return;
  check(at >= 0 && n >= 0 && n <= size && at <= size - n, "numbers outside their array");
}

}  // namespace

int64_t elements(const Buffer& b) {
  int64_t n = 1;
  for (int i = 0; i < b.rank; ++i) n *= b.dims[i];
  return n;
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

}  // namespace sums
}  // namespace recom
