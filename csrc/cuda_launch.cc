#include "cuda_launch.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "decode.h"
#include "recom_abi.h"

namespace recom {
namespace {

using decode::check_version;
using decode::Reader;

constexpr int64_t kMaxChoice = int64_t{1} << 20;

[[noreturn]] void fail(const std::string& what) { throw ProgramError("recom launch: " + what); }

void check(bool ok, const char* what) {
  if (!ok) fail(what);
}

// The stores of the class's width and, going backwards, everything they read.
void find_ops(const ColumnClass& c, CudaClass* k) {
  std::vector<char> needed(c.regs.size(), 0);
  const auto need = [&](int r) {
    if (r >= 0) needed[r] = 1;
  };
  for (int i = static_cast<int>(c.ops.size()) - 1; i >= 0; --i) {
    const Op& o = c.ops[i];
    if (o.op == opcode::k_STORE) {
      if (c.regs[o.a].width_slot != k->width_slot) continue;
      k->stores.push_back(i);
    } else if (o.op == opcode::k_REGION || o.op == opcode::k_JREGION) {
      bool inside = false;
      for (int at : k->ops) inside |= at > i && at < o.body_end;
      if (!inside) continue;
    } else if (!needed[o.dst]) {
      continue;
    }
    k->ops.push_back(i);
    for (int r : {o.a, o.b, o.c}) need(r);
    // A reduction comes after seg's writer, so this is early enough.
    if (o.region >= 0) need(c.ops[o.region].a);
  }
  std::reverse(k->ops.begin(), k->ops.end());
  std::reverse(k->stores.begin(), k->stores.end());
}

CudaClass read_class(Reader* r, const Program& p) {
  CudaClass k;
  k.program_class = r->below(p.classes.size(), "launch: program class");
  const ColumnClass& c = p.classes[k.program_class];
  const int form = r->below(recom_cuda::kRuns + recom_cuda::kSearches + 1, "launch: form");
  k.form = form % recom_cuda::kSearches;
  k.searches = form >= recom_cuda::kSearches;
  const int64_t width = r->next();
  check(width >= -1 && width < static_cast<int64_t>(c.slot_kinds.size()), "no such width slot");
  k.width_slot = static_cast<int>(width);
  check(k.width_slot < 0 || c.slot_kinds[k.width_slot] <= slot_kind::k_DIM,
        "a width slot that holds no size");
  k.vec = r->below(17, "launch: vector");
  check(k.vec > 0 && (k.vec & (k.vec - 1)) == 0, "a vector's length is a power of two");
  check(k.width_slot >= 0 || k.vec == 1, "a scalar class has no vectors");
  find_ops(c, &k);
  check(!k.stores.empty(), "a class that stores nothing");
  int want = recom_cuda::kPlain;
  for (int i : k.ops) {
    if (c.ops[i].op == opcode::k_REGION) want = std::max<int>(want, recom_cuda::kRegion);
    if (c.ops[i].op == opcode::k_JREGION) want = recom_cuda::kJagged;
  }
  const bool runs = k.form == recom_cuda::kRuns && want == recom_cuda::kJagged && k.vec > 1;
  check(k.form == want || runs, "a class's form is not its code's");
  check(!k.searches || want == recom_cuda::kJagged, "a class without segment ids searches none");
  return k;
}

void check_type(const Buffer& b, const BufferType& want, const char* what, size_t i) {
  if (b.dtype == want.dtype && b.rank == want.rank) return;
  fail(std::string(what) + " " + std::to_string(i) + " has dtype " + std::to_string(b.dtype) +
       " and rank " + std::to_string(b.rank) + ", the program wants " + std::to_string(want.dtype) +
       " and " + std::to_string(want.rank));
}

}  // namespace

LaunchWords decode_launch(const Program& program, std::string_view bytes) {
  check(bytes.size() % 8 == 0, "not a whole number of words");
  std::vector<int64_t> words(bytes.size() / 8);  // the bytes may sit at any address
  if (!bytes.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
  Reader r(words.data(), words.size());
  check(!r.done() && r.next() == kLaunchMagic, "not launch words (bad magic)");
  const int64_t version = r.next();
  if (version != kLaunchVersion) check_version(version, kTunedVersion, "launch format");
  const int64_t n_classes = r.count("launch classes", 4), n_units = r.count("launch units", 2);
  LaunchWords out;
  if (version == kTunedVersion) {
    // Bounds that no arithmetic of the plan can overflow in.
    out.choice.slice_positions =
        static_cast<double>(r.below(kMaxChoice, "launch: positions")) / 1000;
    out.choice.run_bytes = r.below(kMaxChoice, "launch: bytes of a run");
    out.choice.tiles_per_sm = r.below(kMaxChoice, "launch: tiles");
  }
  for (int64_t i = 0; i < n_classes; ++i) out.classes.push_back(read_class(&r, program));
  for (int64_t i = 0; i < n_units; ++i) {
    CudaUnit u;
    u.column = r.below(program.columns.size(), "launch: column");
    u.cls = r.below(n_classes, "launch: class");
    check(program.columns[u.column].cls == out.classes[u.cls].program_class,
          "a unit's class is not its column's");
    out.units.push_back(u);
  }
  check(r.done(), "words after the last unit");
  return out;
}

void bind_layout(const Program& program, const std::vector<Buffer>& physical, const int64_t* layout,
                 int64_t n_layout, std::vector<Buffer>* operands, std::vector<CudaPlace>* places) {
  const size_t n = program.operands.size();
  const int64_t* end = layout + n_layout;
  operands->clear();
  places->clear();
  operands->reserve(n);
  places->reserve(n);
  for (size_t i = 0; i < n; ++i) {
    check(end - layout >= 3, "the layout is truncated");
    const int64_t at = layout[0], offset = layout[1], rank = layout[2];
    layout += 3;
    check(at >= 0 && at < static_cast<int64_t>(physical.size()), "layout: no such operand");
    check(offset >= -1, "layout: a bad offset");
    check(rank >= 0 && rank <= end - layout, "layout: a bad rank");
    Buffer b = physical[at];
    if (offset == -1) {
      check(rank == 0, "layout: dims of a whole operand");
    } else {
      const int dtype = program.operands[i].dtype;
      check(b.dtype == dtype::k_U8 && b.rank == 1, "a pack is a rank 1 uint8 operand");
      __int128 bytes = element_size(dtype);
      for (int64_t d = 0; d < rank; ++d) {
        check(layout[d] >= 0, "layout: a negative dim");
        bytes *= layout[d];
        check(bytes <= INT64_MAX, "layout: an entry is too large");
      }
      check(offset <= b.dims[0] && bytes <= b.dims[0] - offset,
            "layout: an entry outside its pack");
      check(offset % element_size(dtype) == 0, "layout: an entry is not aligned");
      check(offset < int64_t{1} << recom_cuda::kOffsetBits, "layout: a pack is too large");
      b = {nullptr, layout, static_cast<int>(rank), dtype};
    }
    check_type(b, program.operands[i], "operand", i);
    operands->push_back(b);
    places->push_back({static_cast<int>(at), std::max<int64_t>(offset, 0)});
    layout += rank;
  }
  check(layout == end, "layout: words after the last operand");
}

void check_results(const Program& program, const std::vector<Buffer>& results) {
  check(results.size() == program.results.size(), "the wrong number of results");
  for (size_t i = 0; i < results.size(); ++i) {
    check_type(results[i], program.results[i], "result", i);
  }
}

}  // namespace recom
