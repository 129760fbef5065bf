// How the work of a plan is cut: columns that are written together, and chunks for threads.

#include "plan_chunks.h"

#include <algorithm>

namespace recom {
namespace {

// Element operations, of which a thread does two or three a nanosecond. Waking a thread of the pool
// takes tens of microseconds, and more where the cores are busy: what the caller has done in some
// fifty, it does alone. A chunk is worth taking once somebody is awake.
constexpr int64_t kSmallWork = 120000, kLeastChunk = 5000;

// Bytes of the rows that a plain lookup column writes through, 0 if it is no such column.
int64_t plain_bytes(const Plan::Col& col, const std::vector<Buffer>& operands) {
  const ColumnClass& c = *col.cls;
  if (c.plain_take < 0 || !col.v[c.ops[c.plain_take].words + 1]) return 0;
  const Register& g = c.regs[c.ops[c.plain_take].dst];
  if (operands[col.v[c.ops[c.plain_take].buffer]].dtype != g.dtype) return 0;
  const int64_t bytes = col.v[g.width_slot] * g.size;
  return bytes == 16 || bytes == 32 || bytes == 64 || bytes == 128 ? bytes : 0;
}

bool streams(const Buffer& result, int threads) {
  double bytes = element_size(result.dtype);
  for (int i = 0; i < result.rank; ++i) bytes *= static_cast<double>(result.dims[i]);
  return bytes > static_cast<double>(kStreamBytes) * std::max(threads, 1);
}

int64_t tile_for(int64_t bags) {
  // Blocks of columns do the balancing: two threads take them from the two ends.
  // A few tiles a thread hold together so many bags that a column's table is read once for them.
  if (bags <= 4 * kMaxTile) return bags;
  return kMaxTile * 2;
}

void split(size_t begin, size_t end, double target, const std::vector<double>& cost, int threads,
           Plan* plan) {
  const int64_t bags = plan->cols[begin].bags;
  const bool jagged = plan->cols[begin].cls->jagged;
  int64_t tile = jagged ? (bags + threads - 1) / threads : tile_for(bags);
  if (plan->small) tile = bags;
  for (int64_t b = 0; b < bags; b += tile) {
    const int64_t n = std::min(tile, bags - b);
    size_t c = begin;
    while (c < end) {
      double work = 0;
      size_t stop = c;
      do {
        // A group of columns is not torn apart.
        const size_t whole = std::min<size_t>(stop + plan->cols[stop].group, end);
        while (stop < whole) work += cost[stop++] * n;
      } while (stop < end && work + cost[stop] * n / 2 < target);
      plan->chunks.push_back({static_cast<int>(c), static_cast<int>(stop), b, b + n});
      c = stop;
    }
  }
}

}  // namespace

void group_columns(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                   int threads, Plan* plan) {
  for (size_t i = 0; i < plan->cols.size();) {
    Plan::Col& first = plan->cols[i];
    const int64_t bytes = plain_bytes(first, operands);
    size_t end = i + 1;
    while (bytes && end < plan->cols.size() && (end - i + 1) * bytes <= kGroupBytes) {
      const Plan::Col &last = plan->cols[end - 1], &next = plan->cols[end];
      if (plain_bytes(next, operands) != bytes || next.bags != first.bags) break;
      const Op &a = last.cls->ops.back(), &b = next.cls->ops.back();
      const Register& g = last.cls->regs[a.a];
      if (next.cls->regs[b.a].size != g.size || last.v[a.buffer] != next.v[b.buffer] ||
          last.v[a.words] != next.v[b.words] ||
          (last.v[a.words] == 1 && last.v[a.words + 2] != next.v[b.words + 2]) ||
          next.v[b.offset] - last.v[a.offset] != bytes / g.size) {
        break;
      }
      ++end;
    }
    first.group = static_cast<int>(end - i);
    first.stream = bytes && streams(results[first.v[first.cls->ops.back().buffer]], threads);
    i = end;
  }
}

void cut_chunks(const std::vector<double>& cost, int threads, Plan* plan) {
  double total_cost = 0;
  for (size_t i = 0; i < cost.size(); ++i) total_cost += cost[i] * plan->cols[i].bags;
  plan->small = total_cost < kSmallWork || threads <= 1;
  const double target =
      plan->small ? total_cost + 1 : std::max(total_cost / (threads * 16.0), double{kLeastChunk});
  size_t i = 0;
  while (i < plan->cols.size()) {
    const Plan::Col& first = plan->cols[i];
    size_t end = i;
    while (end < plan->cols.size() && plan->cols[end].bags == first.bags &&
           plan->cols[end].cls->jagged == first.cls->jagged) {
      ++end;
    }
    if (first.bags > 0) split(i, end, target, cost, threads, plan);
    i = end;
  }
}

}  // namespace recom
