// Decoding and validation of programs: after this, the interpreter trusts every register, slot,
// dtype and width it meets. What depends on sizes is checked when a plan is built (plan.cc).

#include "program.h"

#include <cstring>
#include <list>
#include <unordered_map>
#include <utility>

#include "decode.h"
#include "kernels.h"

namespace recom {
namespace {

using decode::check;
using decode::check_version;
using decode::decode_class;
using decode::fail;
using decode::kMaxRank;
using decode::Reader;

// What a class leaves open because the buffers are per column: their dtypes.
void check_column(const Program& p, const Column& col) {
  const ColumnClass& c = p.classes[col.cls];
  for (size_t i = 0; i < col.slots.size(); ++i) {
    static constexpr const char* kNames[] = {"", "dim", "operand", "result"};
    const int64_t limits[] = {0, static_cast<int64_t>(p.dims.size()),
                              static_cast<int64_t>(p.operands.size()),
                              static_cast<int64_t>(p.results.size())};
    int kind = c.slot_kinds[i];
    if (kind == slot_kind::k_IMM) continue;
    if (col.slots[i] < 0 || col.slots[i] >= limits[kind]) {
      fail(std::string("a column's slot is out of range: ") + kNames[kind]);
    }
  }
  const Kernels& k = base_kernels();
  for (const Op& o : c.ops) {
    if (o.buffer < 0) continue;
    int64_t b = col.slots[o.buffer];
    int have = (o.op == opcode::k_STORE ? p.results : p.operands)[b].dtype;
    int want = c.regs[o.op == opcode::k_STORE || o.op == opcode::k_SEARCH ? o.a : o.dst].dtype;
    bool ok = have == want;
    if (o.op == opcode::k_STORE && want == dtype::k_F32) ok |= is_half(have);
    if (o.op == opcode::k_TAKE) ok = k.take[have][want];
    if (o.op == opcode::k_POOL) ok = k.pool[o.sub][have][want];
    check(ok, "a buffer's dtype does not fit its instruction");
  }
}

void read_types(Reader* r, int64_t n, std::vector<BufferType>* out) {
  out->reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    int64_t t = r->next();
    check(element_size(t) > 0, "unknown dtype");
    int rank = r->below(kMaxRank + 1, "rank");
    out->push_back({static_cast<int>(t), rank});
  }
}

void read_dims(Reader* r, int64_t n, Program* p) {
  for (int64_t i = 0; i < n; ++i) {
    Dim d;
    d.kind = r->below(dim_kind::k_count, "dim kind");
    d.a = r->next();
    d.b = r->next();
    if (d.kind == dim_kind::k_operand_axis || d.kind == dim_kind::k_result_axis) {
      const auto& types = d.kind == dim_kind::k_operand_axis ? p->operands : p->results;
      check(d.a >= 0 && d.a < static_cast<int64_t>(types.size()), "dim of an unknown buffer");
      check(d.b >= 0 && d.b < types[d.a].rank, "dim of an unknown axis");
    } else if (d.kind != dim_kind::k_const) {
      check(d.a >= 0 && d.a < i && d.b >= 0 && d.b < i, "a dim refers to a later dim");
    }
    p->dims.push_back(d);
  }
}

}  // namespace

std::shared_ptr<const Program> decode_program(std::string_view bytes) {
  check(bytes.size() % 8 == 0, "not a whole number of words");
  // The bytes may sit at any address.
  std::vector<int64_t> words(bytes.size() / 8);
  if (!bytes.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
  Reader r(words.data(), words.size());
  check(!r.done() && r.next() == kProgramMagic, "not a program (bad magic)");
  check_version(r.next(), kVersion, "program format");
  check(r.next() == static_cast<int64_t>(words.size()), "wrong length");
  auto p = std::make_shared<Program>();
  const int64_t n_dims = r.count("dims", 3), n_operands = r.count("operands", 2);
  const int64_t n_results = r.count("results", 2), n_classes = r.count("classes", 4);
  const int64_t n_columns = r.count("columns");
  read_types(&r, n_operands, &p->operands);
  read_types(&r, n_results, &p->results);
  read_dims(&r, n_dims, p.get());
  for (int64_t i = 0; i < n_classes; ++i) {
    p->classes.emplace_back();
    decode_class(&r, &p->classes.back());
  }
  for (int64_t i = 0; i < n_columns; ++i) {
    Column col;
    col.cls = r.below(n_classes, "class");
    const size_t n_slots = p->classes[col.cls].slot_kinds.size();
    for (size_t s = 0; s < n_slots; ++s) col.slots.push_back(r.next());
    check_column(*p, col);
    p->columns.push_back(std::move(col));
  }
  check(r.done(), "words after the last column");
  ++stats().programs_decoded;
  return p;
}

std::shared_ptr<const Program> cached_program(std::string_view hash, std::string_view bytes) {
  struct Entry {
    std::string key, bytes;
    std::shared_ptr<const Program> program;
  };
  static constexpr size_t kMaxEntries = 256;
  static std::mutex mutex;
  // Least recently used last. Leaked, so that a call during process exit still finds it.
  static auto* entries = new std::list<Entry>;
  static auto* index = new std::unordered_map<std::string, std::list<Entry>::iterator>;
  std::string key(hash);
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = index->find(key);
    if (it != index->end() && it->second->bytes == bytes) {
      entries->splice(entries->begin(), *entries, it->second);
      ++stats().program_cache_hits;
      return it->second->program;
    }
  }
  auto program = decode_program(bytes);
  std::lock_guard<std::mutex> lock(mutex);
  auto it = index->find(key);
  if (it != index->end()) {
    entries->erase(it->second);
    index->erase(it);
  }
  entries->push_front({key, std::string(bytes), program});
  (*index)[key] = entries->begin();
  if (entries->size() > kMaxEntries) {
    index->erase(entries->back().key);
    entries->pop_back();
  }
  stats().programs_cached = entries->size();
  return program;
}

Stats& stats() {
  static auto* s = new Stats;
  return *s;
}

}  // namespace recom
