// Regions: positions in chunks, and the reductions over them.

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>

#include "exec.h"
#include "prefetch.h"

namespace recom {
namespace {

void put_nan(char* p, int t) {
  if (t == dtype::k_F64) {
    const double v = std::numeric_limits<double>::quiet_NaN();
    std::memcpy(p, &v, 8);
  } else {
    const float v = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(p, &v, 4);
  }
}

// Tables above this are not in the cache by themselves.
constexpr int64_t kBigTable = 1 << 17;
// How far ahead rows of such a table are asked for: positions, bytes of their rows, and of one row.
constexpr int64_t kLeastAhead = 8, kMostAhead = 256, kBytesAhead = 64 << 10, kRowAhead = 512;

bool is_reduction(const Op& o) { return o.op == opcode::k_POOL || o.op == opcode::k_ACC; }

}  // namespace

void Exec::region(const Op& o, int self) {
  const int64_t inner = col_->v[o.words];
  inner_ = inner;
  segs_ = nullptr;
  selected_.clear();
  // Where a bag has positions, the first of them starts from init.
  if (inner == 0) start_reductions(self + 1, o.body_end);
  int64_t chunk = col_->chunk;
  if (inner > 0 && inner <= chunk) chunk -= chunk % inner;  // whole bags
  const int64_t end = (bag0_ + bags_) * inner;
  for (int64_t at = bag0_ * inner; at < end; at += chunk) {
    run(self + 1, o.body_end, at, std::min(chunk, end - at));
  }
  finish_reductions(self + 1, o.body_end);
}

void Exec::jagged(const Op& o, int self) {
  const int64_t total = col_->v[o.n];
  const int first_rest = self + 1 + o.n_seg_ops, t = info(o.a).dtype;
  inner_ = 0;
  selected_.clear();
  start_reductions(self + 1, o.body_end);
  int64_t segs[kMaxChunk];
  for (int64_t at = 0; at < total; at += col_->chunk) {
    const int64_t n = std::min(col_->chunk, total - at);
    run(self + 1, first_rest, at, n);
    // An unsigned seg above 2^63 becomes negative, and is dropped either way.
    k_.convert[t][dtype::k_S64](segs, reg_[o.a], n);
    int64_t lo, hi;
    k_.range(segs, n, &lo, &hi);
    // Other tiles look at these positions: where segs are sorted, each does its share only.
    if (hi < bag0_ || lo >= bag0_ + bags_) continue;
    segs_ = segs;
    run(first_rest, o.body_end, at, n);
    segs_ = nullptr;
  }
  finish_reductions(self + 1, o.body_end);
}

// Every bag of the tile starts from init.
void Exec::start_reductions(int begin, int end) {
  for (int i = begin; i < end; ++i) {
    const Op& o = col_->cls->ops[i];
    if (!is_reduction(o)) continue;
    const int size = info(o.dst).size;
    const int64_t d = width(o.dst);
    const Dest to = o.op == opcode::k_POOL ? destination(o) : Dest{own(o.dst), d};
    for (int64_t b = 0; b < bags_ && d > 0; ++b) {
      k_.fill[size](to.base + b * to.pitch * size, &col_->v[o.init], d);
    }
  }
}

// A row of a big table costs an address translation and a trip to memory. In a loop of their own
// many of them are under way at once; in a loop that also sums up, few are.
int64_t Exec::prefetch_rows(const Op& o, const TableRef& t, int64_t item, int64_t end) const {
  const int64_t size = element_size(operands_[col_->v[o.buffer]].dtype);
  const int64_t bytes = std::min(t.width * size, kRowAhead);
  const auto* idx = reinterpret_cast<const int64_t*>(reg_[o.a]);
  const auto* base = static_cast<const char*>(t.base);
  for (int64_t i = item; i < end; ++i) {
    if (static_cast<uint64_t>(idx[i]) >= static_cast<uint64_t>(t.limit)) continue;
    if (segs_ && (segs_[i] < bag0_ || segs_[i] >= bag0_ + bags_)) continue;
    prefetch(base + idx[i] * t.row_stride * size, bytes);
  }
  return end;
}

void Exec::reduce(const Op& o, int64_t start, int64_t count) {
  // Items whose rows are asked for: all, where the table is small.
  int64_t asked = count, ahead = 0;
  TableRef t{};
  if (o.op == opcode::k_POOL) {
    t = table(o);
    const int64_t size = element_size(operands_[col_->v[o.buffer]].dtype);
    const __int128 bytes = static_cast<__int128>(t.limit) * t.row_stride * size;
    if (t.width > 0 && bytes > kBigTable) {
      asked = 0;
      ahead = std::min(std::max(kBytesAhead / (t.width * size), kLeastAhead), kMostAhead);
    }
  }
  const auto ask = [&](int64_t end) {
    if (asked < count && asked < end + ahead / 2) {
      asked = prefetch_rows(o, t, asked, std::min(end + ahead, count));
    }
  };
  if (segs_) {
    // Runs of positions of one bag.
    for (int64_t i = 0; i < count;) {
      int64_t n = 1;
      while (i + n < count && segs_[i + n] == segs_[i]) ++n;
      const int64_t bag = segs_[i] - bag0_;
      ask(i + n);
      if (segs_[i] >= bag0_ && bag < bags_) reduce_run(o, bag, 1, i, n, false);
      i += n;
    }
    return;
  }
  for (int64_t done = 0; done < count;) {
    const int64_t bag = (start + done) / inner_, at = (start + done) % inner_;
    const int64_t left = count - done;
    if (at == 0 && left >= inner_) {
      int64_t bags = left / inner_;
      if (ahead > 0) bags = std::min(bags, std::max<int64_t>(ahead / inner_, 1));
      ask(done + bags * inner_);
      reduce_run(o, bag - bag0_, bags, done, inner_, true);
      done += bags * inner_;
    } else {
      const int64_t n = std::min(inner_ - at, left);
      ask(done + n);
      reduce_run(o, bag - bag0_, 1, done, n, at == 0);
      done += n;
    }
  }
}

void Exec::reduce_run(const Op& o, int64_t bag, int64_t bags, int64_t item, int64_t positions,
                      bool first) {
  const int64_t* v = col_->v;
  const Register& g = info(o.dst);
  if (o.op == opcode::k_ACC) {
    const int64_t d = width(o.dst), bytes = d * g.size;
    char* dst = own(o.dst) + bag * bytes;
    const char* src = reg_[o.a] + item * bytes;
    for (int64_t b = 0; b < bags && d > 0; ++b) {
      if (first) k_.fill[g.size](dst, &v[o.init], d);
      k_.acc[o.sub][g.dtype](dst, src, positions, d);
      dst += bytes;
      src += positions * bytes;
    }
    return;
  }
  const Dest to = destination(o);
  PoolArgs a;
  a.table = table(o);
  if (a.table.width == 0) return;
  const int type = operands_[v[o.buffer]].dtype;
  a.idx = reinterpret_cast<const int64_t*>(reg_[o.a]) + item;
  a.weight = o.b >= 0 ? reg_[o.b] + item * g.size : nullptr;
  a.init = &v[o.init];
  a.positions = positions;
  a.bags = bags;
  a.dst_pitch = to.pitch;
  a.first = first;
  bad_index_ |= !k_.pool[o.sub][type][g.dtype](a, to.base + bag * to.pitch * g.size);

  const int64_t scan = (o.flags & flag::k_ONE_HOT) ? v[o.words + 2] : -1;
  if (scan < 0 || !scans_[scan].any) return;
  for (int64_t i = 0; i < bags * positions; ++i) {
    const int64_t r = a.idx[i];
    if (static_cast<uint64_t>(r) < static_cast<uint64_t>(a.table.limit)) {
      selected_.push_back({&o, bag + i / positions, r});
    }
  }
}

void Exec::finish_reductions(int begin, int end) {
  for (int i = begin; i < end; ++i) {
    const Op& o = col_->cls->ops[i];
    if (o.op == opcode::k_POOL && (o.flags & flag::k_ONE_HOT) && is_float(info(o.dst).dtype)) {
      finish_one_hot(o);
    }
  }
}

void Exec::finish_one_hot(const Op& o) {
  const Register& g = info(o.dst);
  const Dest to = destination(o);
  const TableRef t = table(o);
  if (t.width == 0) return;
  for (int64_t b = 0; b < bags_; ++b) {
    char* row = to.base + b * to.pitch * g.size;
    k_.canonical_zero[g.dtype](row, row, t.width);
  }
  const int64_t scan = col_->v[o.words + 2];
  if (scan < 0 || !scans_[scan].any) return;
  // A feature is NaN if some row that is not finite there was selected by no position of the bag.
  const int type = operands_[col_->v[o.buffer]].dtype, size = element_size(type);
  std::vector<std::pair<int64_t, int64_t>> picked;
  for (const Selected& s : selected_) {
    if (s.op == &o) picked.emplace_back(s.bag, s.row);
  }
  std::sort(picked.begin(), picked.end());
  picked.erase(std::unique(picked.begin(), picked.end()), picked.end());
  auto at = picked.begin();
  for (int64_t b = 0; b < bags_; ++b) {
    const auto first = at;
    while (at != picked.end() && at->first == b) ++at;
    for (int64_t j = 0; j < t.width; ++j) {
      int64_t n = scans_[scan].per_feature[j];
      if (n == 0) continue;
      for (auto p = first; p != at; ++p) {
        n -= k_.any_non_finite[type](
            static_cast<const char*>(t.base) + (p->second * t.row_stride + j) * size, 1);
      }
      if (n > 0) put_nan(to.base + (b * to.pitch + j) * g.size, g.dtype);
    }
  }
}

}  // namespace recom
