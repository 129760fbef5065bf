// Which bag a position belongs to, from the splits between bags or from their lengths.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "exec.h"

namespace recom {
namespace {

// Where bags start, ascending, without those that no position can reach: as docs/program_format.md
// says, and so as jnp.repeat has it, whatever the boundaries.
template <class T>
void fill_starts(const char* boundaries, int64_t n, bool lengths, int64_t total,
                 std::vector<int32_t>* out) {
  using U = std::make_unsigned_t<T>;  // wraps
  const auto* v = reinterpret_cast<const U*>(boundaries);
  out->resize(n);
  int32_t* to = out->data();
  U start = 0;
  bool ascends = true;
  int32_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    U s = lengths ? start : static_cast<U>(v[i] - v[0]);
    if (lengths) start += v[i];
    if (std::is_signed_v<T> && static_cast<T>(s) < 0) s += static_cast<U>(total);
    const auto at = static_cast<int32_t>(static_cast<uint32_t>(s));
    if (at < 0 || at >= total) continue;
    ascends &= at >= last;
    *to++ = last = at;
  }
  out->resize(to - out->data());
  if (!ascends) std::sort(out->begin(), out->end());
}

}  // namespace

const std::vector<int32_t>& Exec::starts(const Op& o) {
  for (const Starts& s : starts_) {
    if (s.op == &o && s.col == col_) return s.at;
  }
  starts_.push_back({col_, &o, {}});
  const int64_t* v = col_->v;
  const int t = info(o.a).dtype;
  const char* base = static_cast<const char*>(operands_[v[o.buffer]].data);
  if (v[o.n] > 0) base += v[o.offset] * element_size(t);
  const auto fill = t == dtype::k_S32   ? fill_starts<int32_t>
                    : t == dtype::k_U32 ? fill_starts<uint32_t>
                    : t == dtype::k_S64 ? fill_starts<int64_t>
                                        : fill_starts<uint64_t>;
  fill(base, v[o.n], o.sub == search_mode::k_LENGTHS, v[o.total], &starts_.back().at);
  return starts_.back().at;
}

void Exec::bag_of(const Op& o, int64_t count) {
  const std::vector<int32_t>& at = starts(o);
  const int t = info(o.a).dtype;
  const auto* x = reinterpret_cast<const int64_t*>(reg_[o.a]);
  if (t != dtype::k_S64) {
    k_.convert[t][dtype::k_S64](temp(0), reg_[o.a], count);
    x = reinterpret_cast<const int64_t*>(temp(0));
  }
  auto* out = reinterpret_cast<int32_t*>(own(o.dst));
  const int64_t n = at.size();
  // How many bags start at x or before it (before it, on the left).
  const auto bags = [&](int64_t p) -> int64_t {
    if (t == dtype::k_U64 && p < 0) return n;
    const auto it = o.side == 0 ? std::lower_bound(at.begin(), at.end(), p)
                                : std::upper_bound(at.begin(), at.end(), p);
    return it - at.begin();
  };
  bool dense = x[0] >= 0 && x[0] <= INT32_MAX;
  for (int64_t i = 0; i < count; ++i) dense &= x[i] == x[0] + i;
  if (!dense) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(bags(x[i]));
    return;
  }
  // Neighbouring positions: runs of one bag each.
  const int64_t first = o.side == 0 ? x[0] - 1 : x[0];
  int64_t k = bags(x[0]);
  for (int64_t i = 0; i < count;) {
    const int64_t end = k < n ? std::min(at[k] - first, count) : count;
    for (; i < end; ++i) out[i] = static_cast<int32_t>(k);
    while (k < n && at[k] - first <= i) ++k;
  }
}

}  // namespace recom
