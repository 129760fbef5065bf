#include "interp.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "exec.h"
#include "float_mode.h"
#include "kernels.h"
#include "prefetch.h"

namespace recom {
namespace {

[[noreturn]] void fail(const std::string& what) { throw ProgramError("recom call: " + what); }

int64_t read_word(const char* p, int64_t i) {
  int64_t w;
  std::memcpy(&w, p + i * 8, 8);
  return w;
}

// An entry of a pack: its header says where it is, and must be inside the buffer.
Buffer pack_entry(const Buffer& pack, int64_t entry, std::vector<int64_t>* storage) {
  if (pack.dtype != dtype::k_U8 || pack.rank != 1) fail("a pack is a rank 1 uint8 operand");
  const int64_t size = pack.dims[0];
  const char* base = static_cast<const char*>(pack.data);
  if (size < 32 || read_word(base, 0) != kPackMagic) fail("not a pack (bad magic)");
  const int64_t n = read_word(base, 1), total = read_word(base, 2);
  if (n < 0 || n > (size - 32) / 56 || total > size || total < 0) fail("a bad pack header");
  if (entry >= n) fail("a pack has no such entry");
  const char* e = base + 32 + entry * 56;
  const int64_t offset = read_word(e, 0), bytes = read_word(e, 1), rank = read_word(e, 2);
  if (offset < 0 || bytes < 0 || offset > total || bytes > total - offset || offset % 64 != 0) {
    fail("a pack entry outside its pack");
  }
  if (rank < 0 || rank > 4) fail("a pack entry's rank");
  const size_t at = storage->size();
  for (int64_t i = 0; i < rank; ++i) storage->push_back(read_word(e, 3 + i));
  return {const_cast<char*>(base) + offset, storage->data() + at, static_cast<int>(rank), 0};
}

void check_buffer(const Buffer& b, const BufferType& want, const char* what, size_t i) {
  if (b.dtype != want.dtype || b.rank != want.rank) {
    fail(std::string(what) + " " + std::to_string(i) + " has dtype " + std::to_string(b.dtype) +
         " and rank " + std::to_string(b.rank) + ", the program wants " +
         std::to_string(want.dtype) + " and " + std::to_string(want.rank));
  }
  if (reinterpret_cast<uintptr_t>(b.data) % element_size(b.dtype)) {
    fail(std::string(what) + " " + std::to_string(i) + " is not aligned");
  }
}

// Registers, kept by the thread for its next chunk.
struct Scratch {
  std::vector<char> bytes;
  std::vector<char*> regs;
};
// More than this is given back after the chunk.
constexpr size_t kKeptScratch = 16 << 20;

Scratch& scratch_for(const Plan& plan) {
  static thread_local Scratch s;
  const size_t need = plan.scratch_bytes + 64;
  if (s.bytes.size() < need) s.bytes.resize(need);
  if (s.bytes.size() > kKeptScratch && need <= kKeptScratch) {
    s.bytes.resize(kKeptScratch);
    s.bytes.shrink_to_fit();
  }
  if (s.regs.size() < static_cast<size_t>(plan.max_regs)) s.regs.resize(plan.max_regs);
  return s;
}

// Which features of the ONE_HOT tables hold values that are not finite: a pass over each table by
// blocks of rows, then counts for the few tables that need them.
std::vector<NonFinite> scan_tables(const Plan& plan, const std::vector<Buffer>& operands,
                                   const Kernels& k, const Executor& executor) {
  std::vector<NonFinite> out(plan.scans.size());
  struct Piece {
    size_t scan;
    int64_t row0, row1;
  };
  std::vector<Piece> pieces;
  for (size_t i = 0; i < plan.scans.size(); ++i) {
    const Plan::Scan& s = plan.scans[i];
    if (s.width == 0) continue;
    const int64_t rows = std::max<int64_t>((1 << 16) / s.width, 1);
    for (int64_t r = 0; r < s.rows; r += rows) pieces.push_back({i, r, std::min(r + rows, s.rows)});
  }
  std::vector<char> bad(pieces.size(), 0);
  auto row_at = [&](const Plan::Scan& s, int64_t r) {
    return static_cast<const char*>(operands[s.operand].data) +
           (s.base + r * s.row_stride) * element_size(s.dtype);
  };
  parallel_for(executor, pieces.size(), [&](int64_t i) {
    const Piece& p = pieces[i];
    const Plan::Scan& s = plan.scans[p.scan];
    if (s.row_stride == s.width) {
      bad[i] = k.any_non_finite[s.dtype](row_at(s, p.row0), (p.row1 - p.row0) * s.width);
      return;
    }
    for (int64_t r = p.row0; r < p.row1 && !bad[i]; ++r) {
      bad[i] = k.any_non_finite[s.dtype](row_at(s, r), s.width);
    }
  });
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!bad[i]) continue;
    const Plan::Scan& s = plan.scans[pieces[i].scan];
    NonFinite& n = out[pieces[i].scan];
    n.any = true;
    n.per_feature.resize(s.width);
    for (int64_t r = pieces[i].row0; r < pieces[i].row1; ++r) {
      const char* row = row_at(s, r);
      if (!k.any_non_finite[s.dtype](row, s.width)) continue;
      for (int64_t j = 0; j < s.width; ++j) {
        n.per_feature[j] += k.any_non_finite[s.dtype](row + j * element_size(s.dtype), 1);
      }
    }
  }
  stats().tables_scanned += plan.scans.size();
  return out;
}

}  // namespace

void bind_operands(const Program& program, const std::vector<Buffer>& physical,
                   const int64_t* binding, int64_t n_binding, std::vector<int64_t>* storage,
                   std::vector<Buffer>* operands) {
  const size_t n = program.operands.size();
  if (n_binding != static_cast<int64_t>(2 * n)) fail("binding has the wrong length");
  storage->clear();
  storage->reserve(4 * n);  // dims point into it: it must not move
  operands->clear();
  operands->reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const int64_t at = binding[2 * i], entry = binding[2 * i + 1];
    if (at < 0 || at >= static_cast<int64_t>(physical.size())) fail("binding: no such operand");
    if (entry < -1) fail("binding: a bad entry");
    if (entry == -1) {
      operands->push_back(physical[at]);
    } else {
      Buffer b = pack_entry(physical[at], entry, storage);
      b.dtype = program.operands[i].dtype;
      __int128 bytes = element_size(b.dtype);
      for (int d = 0; d < b.rank; ++d) {
        if (b.dims[d] < 0) fail("a pack entry's dim is negative");
        bytes *= b.dims[d];
        if (bytes > INT64_MAX) fail("a pack entry is too large");
      }
      if (bytes != read_word(static_cast<const char*>(physical[at].data) + 32 + entry * 56, 1)) {
        fail("a pack entry's size does not fit its dims and dtype");
      }
      operands->push_back(b);
    }
    check_buffer(operands->back(), program.operands[i], "operand", i);
  }
}

void run_program(const Program& program, const std::vector<Buffer>& physical,
                 const std::vector<Buffer>& results, const int64_t* binding, int64_t n_binding,
                 const Executor& executor) {
  std::vector<int64_t> storage;
  std::vector<Buffer> operands;
  bind_operands(program, physical, binding, n_binding, &storage, &operands);
  if (results.size() != program.results.size()) fail("the wrong number of results");
  for (size_t i = 0; i < results.size(); ++i) {
    check_buffer(results[i], program.results[i], "result", i);
  }
  const auto plan = plan_for(program, operands, results, executor.threads);
  const Kernels& k = kernels();
  const FloatMode mode;
  const Executor inline_executor;
  const Executor& ex = plan->small ? inline_executor : executor;
  std::vector<NonFinite> scans;
  if (!plan->scans.empty()) scans = scan_tables(*plan, operands, k, executor);
  std::atomic<bool> bad_index{false};
  parallel_for(ex, plan->chunks.size(), [&](int64_t i) {
    const FloatMode::Scope scope(mode);
    const Plan::Chunk& chunk = plan->chunks[i];
    Scratch& s = scratch_for(*plan);
    char* base = s.bytes.data();
    base += (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64;
    Exec exec(k, operands, results, scans, base, s.regs.data());
    const Plan::Col* const cols = plan->cols.data();
    for (int c = chunk.col0; c < chunk.col1;) {
      const Plan::Col& col = cols[c];
      if (col.group > 1) {
        exec.columns(&col, col.group, cols + chunk.col1, chunk.bag0, chunk.bag1);
      } else {
        exec.column(col, chunk.bag0, chunk.bag1);
      }
      c += col.group;
    }
    settle_streams();
    if (exec.bad_index()) bad_index = true;
  });
  stats().calls += 1;
  stats().chunks_run += plan->chunks.size();
  if (bad_index) fail("a lookup index is outside its table");
}

}  // namespace recom
