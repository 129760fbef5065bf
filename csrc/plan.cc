// Resolving a program's sizes and checking every access, once per set of shapes.
//
// Derived words of a column, from Op::words on:
//   LOAD, AFFINE, STORE   n_dims, then (size, stride) of each: the item dims, merged where the
//                         strides allow, so that a plain column has one
//   TAKE, POOL            row indexes inside the buffer; 1 if it writes through its STORE; scan or
//   -1 REGION                positions per bag

#include "plan.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "plan_chunks.h"

namespace recom {
namespace {

constexpr int64_t kLimit = int64_t{1} << 40;  // of any count of items
constexpr int64_t kRowElements = 1 << 16;     // of one materialised row register
constexpr size_t kMaxPlans = 16;              // per program

[[noreturn]] void fail(const std::string& what) { throw ProgramError("recom call: " + what); }

int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) fail("a dim divides by zero");
  if (b == -1) return static_cast<int64_t>(0 - static_cast<uint64_t>(a));
  int64_t q = a / b;
  return q - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t elements(const Buffer& b) {
  __int128 n = 1;
  for (int i = 0; i < b.rank; ++i) {
    if (b.dims[i] < 0) fail("a negative buffer dim");
    n *= b.dims[i];
    if (n > INT64_MAX / 16) fail("a buffer is too large");
  }
  return static_cast<int64_t>(n);
}

int64_t count_of(int64_t n, int64_t size) {
  if (size < 0) fail("a negative size");
  __int128 r = static_cast<__int128>(n) * size;
  if (r > kLimit) fail("too many items");
  return static_cast<int64_t>(r);
}

// Row indexes r with [base + r * stride, + width) inside [0, size): 0 <= r < result.
int64_t row_limit(int64_t size, int64_t base, int64_t stride, int64_t width) {
  if (width == 0) return kLimit;
  if (base < 0 || base > size - width) return 0;
  if (stride == 0) return kLimit;
  if (stride > 0) return (size - width - base) / stride + 1;
  return static_cast<int64_t>(static_cast<__int128>(base) / -static_cast<__int128>(stride)) + 1;
}

bool positive(uint64_t bits, int t) {
  switch (t) {
    case dtype::k_F32: {
      float f;
      std::memcpy(&f, &bits, 4);
      return f > 0;
    }
    case dtype::k_F64: {
      double f;
      std::memcpy(&f, &bits, 8);
      return f > 0;
    }
    default: {
      int n = element_size(t) * 8;
      uint64_t mask = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
      bool is_signed = t <= dtype::k_S64;
      return (bits & mask) != 0 && !(is_signed && (bits >> (n - 1) & 1));
    }
  }
}

}  // namespace

struct Plan::Builder {
  Plan& plan;
  const Program& p;
  const std::vector<Buffer>& operands;
  const std::vector<Buffer>& results;
  std::vector<int64_t> operand_sizes, result_sizes, dims;
  std::vector<double> cost;  // per bag, of each column

  void run() {
    for (const Buffer& b : operands) operand_sizes.push_back(elements(b));
    for (const Buffer& b : results) result_sizes.push_back(elements(b));
    resolve_dims();
    size_t n_words = 0;
    for (const Column& col : p.columns) n_words += p.classes[col.cls].n_words;
    plan.words_.resize(n_words);
    int64_t* at = plan.words_.data();
    for (const Column& col : p.columns) {
      column(col, at);
      at += p.classes[col.cls].n_words;
    }
    group_columns(operands, results, plan.threads_, &plan);
    cut_chunks(cost, plan.threads_, &plan);
  }

  void resolve_dims() {
    for (const Dim& d : p.dims) {
      const auto u = [&](int64_t i) { return static_cast<uint64_t>(dims[i]); };
      switch (d.kind) {
        case dim_kind::k_const:
          dims.push_back(d.a);
          break;
        case dim_kind::k_operand_axis:
          dims.push_back(operands[d.a].dims[d.b]);
          break;
        case dim_kind::k_result_axis:
          dims.push_back(results[d.a].dims[d.b]);
          break;
        case dim_kind::k_add:
          dims.push_back(u(d.a) + u(d.b));
          break;
        case dim_kind::k_sub:
          dims.push_back(u(d.a) - u(d.b));
          break;
        case dim_kind::k_mul:
          dims.push_back(u(d.a) * u(d.b));
          break;
        default:
          dims.push_back(floor_div(dims[d.a], dims[d.b]));
          break;
      }
    }
  }

  // Item dims of an instruction: the bags, then the positions of its region.
  std::vector<int64_t> item_dims(const ColumnClass& c, const Op& o, const int64_t* v) {
    std::vector<int64_t> sizes;
    const Op* region = o.region >= 0 ? &c.ops[o.region] : nullptr;
    if (region && region->op == opcode::k_JREGION) return {v[region->n]};
    for (int s : c.outer) sizes.push_back(v[s]);
    if (region) {
      for (int s : region->strides) sizes.push_back(v[s]);
    }
    return sizes;
  }

  // Writes the merged dims. Dims of size 1 vanish; neighbours merge when one steps over the other.
  static void merge(const std::vector<int64_t>& sizes, const std::vector<int>& strides, int64_t* v,
                    int64_t* out) {
    int64_t n = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 1) continue;
      const int64_t stride = v[strides[i]];
      if (n > 0) {
        int64_t* last = out + 1 + 2 * (n - 1);
        if (static_cast<__int128>(stride) * sizes[i] == last[1]) {
          last[0] *= sizes[i];
          last[1] = stride;
          continue;
        }
      }
      out[1 + 2 * n] = sizes[i];
      out[2 + 2 * n] = stride;
      ++n;
    }
    out[0] = n;
  }

  void check_access(int64_t size, int64_t offset, const std::vector<int64_t>& sizes,
                    const std::vector<int>& strides, int64_t width, int64_t feature,
                    const int64_t* v) {
    __int128 lo = offset, hi = offset;
    auto axis = [&](int64_t n, int64_t stride) {
      __int128 reach = static_cast<__int128>(n - 1) * stride;
      (reach < 0 ? lo : hi) += reach;
    };
    if (width == 0) return;
    for (int64_t n : sizes) {
      if (n == 0) return;
    }
    for (size_t i = 0; i < sizes.size(); ++i) axis(sizes[i], v[strides[i]]);
    axis(width, feature);
    if (lo < 0 || hi >= size) fail("an access outside a buffer");
  }

  void column(const Column& col, int64_t* v) {
    const ColumnClass& c = p.classes[col.cls];
    for (size_t i = 0; i < col.slots.size(); ++i) {
      v[i] = c.slot_kinds[i] == slot_kind::k_DIM ? dims[col.slots[i]] : col.slots[i];
    }
    Col out{&c, v, 1, kMaxTile, kMaxChunk, 0, 0};
    for (int s : c.outer) out.bags = count_of(out.bags, v[s]);
    for (const Register& g : c.regs) {
      if (g.width_slot < 0) continue;
      if (v[g.width_slot] < 0 || v[g.width_slot] > kLimit / 16) fail("a bad register width");
    }
    for (auto [a, b] : c.equal_widths) {
      if (v[a] != v[b]) fail("register widths differ");
    }
    double per_bag = 0;
    for (const Op& o : c.ops) per_bag += operation(c, o, v, out.bags);
    scratch(c, v, &out);
    plan.cols.push_back(out);
    plan.max_regs = std::max<int64_t>(plan.max_regs, c.regs.size());
    cost.push_back(per_bag);
  }

  // Checks one instruction, writes its derived words, and returns its cost per bag.
  double operation(const ColumnClass& c, const Op& o, int64_t* v, int64_t bags) {
    int64_t* w = v + o.words;
    const int value = o.op == opcode::k_STORE ? o.a : o.dst;
    const bool row = value >= 0 && c.regs[value].width_slot >= 0;
    const int64_t width = row ? v[c.regs[value].width_slot] : 1;
    double items = 1;
    if (o.region >= 0) {
      const Op& r = c.ops[o.region];
      items = r.op == opcode::k_REGION ? static_cast<double>(v[r.words])
                                       : static_cast<double>(v[r.n]) / std::max<int64_t>(bags, 1);
    }
    switch (o.op) {
      case opcode::k_LOAD:
      case opcode::k_STORE:
      case opcode::k_AFFINE: {
        std::vector<int64_t> sizes = item_dims(c, o, v);
        if (o.op != opcode::k_AFFINE) {
          const auto& lens = o.op == opcode::k_LOAD ? operand_sizes : result_sizes;
          check_access(lens[v[o.buffer]], v[o.offset], sizes, o.strides, width,
                       row ? v[o.feature] : 0, v);
        }
        merge(sizes, o.strides, v, w);
        break;
      }
      case opcode::k_SEARCH: {
        const int64_t n = v[o.n], size = operand_sizes[v[o.buffer]];
        if (n < 0 || n >= INT32_MAX || v[o.offset] < 0 || v[o.offset] > size - n) {
          fail("boundaries outside their buffer");
        }
        if (by_bags(o)) {
          if (v[o.total] < 0 || v[o.total] > INT32_MAX) fail("a bad number of positions");
          return items * 2 + static_cast<double>(n) / std::max<int64_t>(bags, 1);
        }
        return items * (o.sub == search_mode::k_COMPARE_ALL ? 1 + n / 4.0 : 12);
      }
      case opcode::k_SEARCH_UNIFORM:
        if (v[o.n] < 0 || v[o.n] > 1 << 29) fail("a bad number of boundaries");
        if (!positive(v[o.init], c.regs[o.a].dtype)) fail("a step that is not positive");
        break;
      case opcode::k_INDEX:
        if (v[o.n] < 0) fail("a negative number of rows");
        break;
      case opcode::k_TAKE:
      case opcode::k_POOL: {
        w[0] = row_limit(operand_sizes[v[o.buffer]], v[o.offset], v[o.n], width);
        w[1] = o.fuse_store >= 0 && writes_through(c, c.ops[o.fuse_store], value, v);
        w[2] = o.rows_slot >= 0 ? scan(o, w[0], width, v) : -1;
        // Rows of a table that no cache holds cost a trip to memory each.
        const double bytes =
            static_cast<double>(w[0]) * v[o.n] * element_size(operands[v[o.buffer]].dtype);
        return items * (4 + width / 4.0) * (bytes > (1 << 20) && width > 0 ? 3 : 1);
      }
      case opcode::k_REGION: {
        w[0] = 1;
        for (int s : o.strides) w[0] = count_of(w[0], v[s]);
        count_of(bags, w[0]);
        return 1;
      }
      case opcode::k_JREGION:
        count_of(1, v[o.n]);
        return 1;
    }
    return items * (row ? 1 + width / 4.0 : 1);
  }

  // A lookup may write straight into the result if its rows lie there densely and evenly.
  bool writes_through(const ColumnClass& c, const Op& store, int value, const int64_t* v) {
    if (v[store.feature] != 1 && v[c.regs[value].width_slot] > 1) return false;
    if (results[v[store.buffer]].dtype != c.regs[value].dtype) return false;
    std::vector<int64_t> sizes = item_dims(c, store, v);
    std::vector<int64_t> w(1 + 2 * sizes.size());
    merge(sizes, store.strides, const_cast<int64_t*>(v), w.data());
    return w[0] <= 1;
  }

  int64_t scan(const Op& o, int64_t limit, int64_t width, const int64_t* v) {
    const int operand = static_cast<int>(v[o.buffer]);
    Scan s{operand,
           operands[operand].dtype,
           v[o.offset],
           v[o.n],
           std::min(std::max<int64_t>(v[o.rows_slot], 0), limit),
           width};
    if (!is_float(s.dtype)) return -1;
    auto it = std::find(plan.scans.begin(), plan.scans.end(), s);
    if (it == plan.scans.end()) it = plan.scans.insert(it, s);
    return it - plan.scans.begin();
  }

  // Lays out one column's registers.
  void scratch(const ColumnClass& c, int64_t* v, Col* out) {
    std::vector<char> skipped(c.regs.size(), 0);
    for (const Op& o : c.ops) {
      if ((o.op == opcode::k_TAKE || o.op == opcode::k_POOL) && v[o.words + 1]) skipped[o.dst] = 1;
    }
    int64_t widest[2] = {1, 1}, bag_bytes = 1;
    for (size_t i = 0; i < c.regs.size(); ++i) {
      const Register& g = c.regs[i];
      const int64_t width = g.width_slot < 0 || skipped[i] ? 1 : v[g.width_slot];
      widest[g.pos] = std::max(widest[g.pos], width);
      if (!g.pos) bag_bytes += width * g.size;
    }
    out->tile = std::min(std::max<int64_t>(kRowElements / widest[0], 1), kMaxTile);
    out->chunk = std::min(std::max<int64_t>(kRowElements / widest[1], 1), kMaxChunk);
    // Each tile of a jagged column looks at every position's seg: few, long tiles.
    if (c.jagged) out->tile = std::max<int64_t>(out->tile, (4 << 20) / bag_bytes);
    out->tile = std::max<int64_t>(std::min(out->tile, out->bags), 1);
    out->temp_each = std::max(out->tile, out->chunk) * 8;
    int64_t at = 0;
    for (size_t i = 0; i < c.regs.size(); ++i) {
      const Register& g = c.regs[i];
      v[g.word] = at;
      if (skipped[i] || g.uniform) continue;
      const int64_t width = g.width_slot < 0 ? 1 : v[g.width_slot];
      const int64_t bytes = (g.pos ? out->chunk : out->tile) * width * g.size;
      at += (bytes + 63) / 64 * 64;
      // A temporary may hold this register's items at any dtype.
      out->temp_each = std::max(out->temp_each, (bytes / g.size * 8 + 63) / 64 * 64);
      if (at > kLimit) fail("registers too large");
    }
    out->temp = at;
    plan.scratch_bytes = std::max(plan.scratch_bytes, at + 3 * out->temp_each);
  }
};

Plan::Plan(const Program& program, const std::vector<Buffer>& operands,
           const std::vector<Buffer>& results, int threads)
    : threads_(threads) {
  for (const auto* list : {&operands, &results}) {
    for (const Buffer& b : *list) shapes_.insert(shapes_.end(), b.dims, b.dims + b.rank);
  }
  Builder{*this, program, operands, results, {}, {}, {}, {}}.run();
  ++stats().plans_built;
  const auto streams = [](const Col& col) { return col.stream; };
  stats().plans_streaming += std::any_of(cols.begin(), cols.end(), streams);
}

bool Plan::matches(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
                   int threads) const {
  if (threads != threads_) return false;
  // Ranks are the program's, so only the dims can differ.
  const int64_t* at = shapes_.data();
  for (const auto* list : {&operands, &results}) {
    for (const Buffer& b : *list) {
      for (int i = 0; i < b.rank; ++i) {
        if (*at++ != b.dims[i]) return false;
      }
    }
  }
  return true;
}

std::shared_ptr<const Plan> plan_for(const Program& program, const std::vector<Buffer>& operands,
                                     const std::vector<Buffer>& results, int threads) {
  std::vector<std::shared_ptr<const Plan>> plans;
  {
    std::lock_guard<std::mutex> lock(program.plans_mutex);
    plans = program.plans;
  }
  for (const auto& plan : plans) {
    if (plan->matches(operands, results, threads)) return plan;
  }
  auto plan = std::make_shared<const Plan>(program, operands, results, threads);
  std::lock_guard<std::mutex> lock(program.plans_mutex);
  auto& kept = program.plans;
  kept.insert(kept.begin(), plan);
  if (kept.size() > kMaxPlans) kept.pop_back();
  return plan;
}

}  // namespace recom
