#include "cuda_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>

#include "cuda_cost.h"
#include "cuda_launch.h"

namespace recom {
namespace {

using recom_cuda::Tile;

[[noreturn]] void fail(const std::string& what) { throw ProgramError("recom call: " + what); }

constexpr double kMaxPositions = 1 << 30;
constexpr int64_t kMaxTiles = 1 << 20;  // of a launch: larger tiles beyond it

// A unit resolved for the call's shapes.
struct Unit {
  const Plan::Col* col;
  const CudaClass* k;
  int cls;
  int column;
  UnitShape shape;
  int64_t result_bytes;  // of a bag's row, or scalar
  bool aligned;
  int64_t room;    // bytes for its tiles, if they search; 0: they don't
  int64_t memory;  // where those begin
};

class Planner {
 public:
  Planner(const Program& program, const CudaCall& call) : p_(program), call_(call) {}

  CudaPlan run() {
    if (call_.sms < 1) fail("a device without multiprocessors");
    if (call_.pointers < 0 || call_.pointers > RECOM_POINTERS) fail("a bad number of pointers");
    launch_ = decode_launch(p_, call_.launch);
    if (call_.slice_positions > 0) launch_.choice.slice_positions = call_.slice_positions;
    bind_layout(p_, call_.operands, call_.layout, call_.n_layout, &operands_, &places_);
    CudaPlan out;
    out.searches = std::any_of(launch_.classes.begin(), launch_.classes.end(),
                               [](const CudaClass& k) { return k.searches; });
    results_ = call_.results;
    if (out.searches && results_.size() == p_.results.size() + 1) take_memory();
    check_results(p_, results_);
    const Plan plan(p_, operands_, results_, 1);  // resolves sizes, checks every access
    std::vector<Unit> units;
    for (const CudaUnit& u : launch_.units) {
      Unit unit = resolve(plan.cols[u.column], u);
      // Nothing to compute: no bags, or rows without features.
      if (unit.shape.bags > 0 && unit.shape.width > 0) units.push_back(unit);
    }
    for (size_t at = 0; at < units.size();) at = add_launch(units, at, &out);
    return out;
  }

 private:
  // The result that is memory for what tiles that search have found.
  void take_memory() {
    const Buffer& b = results_.back();
    if (b.dtype != dtype::k_U8 || b.rank != 1) fail("memory that is no bytes");
    free_ = std::clamp<int64_t>(b.dims[0], 0, kMaxTiles);
    results_.pop_back();
  }

  // ---- units ----

  Unit resolve(const Plan::Col& col, const CudaUnit& u) {
    const CudaClass& k = launch_.classes[u.cls];
    const ColumnClass& c = *col.cls;
    const int64_t width = k.width_slot < 0 ? 1 : col.v[k.width_slot];
    const UnitShape shape{k.form, k.vec, width, col.bags, 0, 0, 0, 0, false};
    Unit out{&col, &k, u.cls, u.column, shape, 0, false, 0, 0};
    const Op& store = c.ops[k.stores.front()];
    out.result_bytes = width * element_size(results_[col.v[store.buffer]].dtype);
    for (int i : k.ops) measure(c, c.ops[i], col, &out.shape);
    // Of row splits, which a search is made of, no tile looks at positions.
    if (recom_cuda::is_jagged(k.form) && out.shape.steps == 0) {
      out.shape.looks = out.shape.positions * static_cast<double>(col.bags);
    }
    // The kernel counts positions in 32 bits, a few rounds beyond the end included.
    if (out.shape.positions * (recom_cuda::is_jagged(k.form) ? col.bags : 1) > kMaxPositions) {
      fail("a bag, or a jagged array, of more than 2^30 positions");
    }
    out.aligned = k.vec > 1 && width % k.vec == 0;
    for (int i : k.ops) out.aligned = out.aligned && aligned(c, c.ops[i], col, k.vec);
    // Code for staged tiles of jagged bags multiplies strides of 32 bits.
    if (recom_cuda::is_jagged(k.form)) out.aligned = out.aligned && near(c, k, col);
    if (k.searches) let_search(&out);
    return out;
  }

  static int64_t ids_of(const Unit& u) {
    return std::llround(u.shape.positions * static_cast<double>(u.shape.bags));
  }

  // Has the unit's tiles search, where it has so many ids and there is memory left.
  void let_search(Unit* u) {
    const int64_t ids = ids_of(*u);
    const int64_t from = call_.searched_ids > 0 ? call_.searched_ids : kSearchedIds;
    if (ids < from || u->shape.bags < 1) return;
    const int64_t room = std::min(u->shape.bags, ids / std::min(kLeastSearched, from));
    if (room > free_) return;
    free_ -= room;
    u->room = room;
    u->memory = free_;
    u->shape.looks = 0;
  }

  void measure(const ColumnClass& c, const Op& o, const Plan::Col& col, UnitShape* s) {
    const int64_t* v = col.v;
    switch (o.op) {
      case opcode::k_REGION:
        s->positions = std::max<double>(s->positions, v[o.words]);
        break;
      case opcode::k_JREGION:
        s->positions = std::max<double>(
            s->positions, static_cast<double>(v[o.n]) / std::max<int64_t>(col.bags, 1));
        break;
      case opcode::k_SEARCH:
        s->steps += o.sub == search_mode::k_COMPARE_ALL ? v[o.n] / 4.0 : std::log2(v[o.n] + 1.0);
        break;
      case opcode::k_TAKE:
      case opcode::k_POOL:
        check_ids(c, o, v);
        s->alone |= (o.flags & flag::k_ONE_HOT) != 0;  // the block scans the table
        [[fallthrough]];
      case opcode::k_LOAD:
        if (o.op != opcode::k_LOAD || c.regs[o.dst].width_slot >= 0) {
          s->row_bytes = std::max(s->row_bytes, element_size(operands_[v[o.buffer]].dtype));
        }
        break;
    }
  }

  // The kernel doesn't check ids: INDEX has put them into [0, rows), which must be rows of the
  // buffer.
  void check_ids(const ColumnClass& c, const Op& lookup, const int64_t* v) {
    const auto def = [&](int r) -> const Op& { return c.ops[c.regs[r].writer]; };
    int r = lookup.a;
    for (int steps = 0; steps < 4; ++steps) {
      if (c.regs[r].writes != 1) break;
      const Op& o = def(r);
      if (o.op == opcode::k_INDEX) {
        if (v[o.n] > v[lookup.words]) fail("a lookup reaches beyond its table");
        return;
      }
      // A row of one of several stacked tables: INDEX checked it inside its own.
      if (o.op == opcode::k_SELECT) return;
      if (o.op != opcode::k_PREDICATE && o.op != opcode::k_EXPAND) break;
      r = o.a;
    }
    fail("a lookup's ids do not come from INDEX");
  }

  // Whether the instruction's accesses of rows are whole vectors, given buffers that start at
  // kBaseAlignment.
  bool aligned(const ColumnClass& c, const Op& o, const Plan::Col& col, int vec) {
    const int64_t* v = col.v;
    const bool lookup = o.op == opcode::k_TAKE || o.op == opcode::k_POOL;
    const bool store = o.op == opcode::k_STORE;
    if (!lookup && !store && o.op != opcode::k_LOAD) return true;
    if (!lookup && c.regs[store ? o.a : o.dst].width_slot < 0) return true;
    const int64_t buffer = v[o.buffer];
    const int64_t size = element_size((store ? results_ : operands_)[buffer].dtype);
    const int64_t access = std::min<int64_t>(kBaseAlignment, vec * size);
    const auto whole = [&](int64_t n) { return n * size % access == 0; };
    if (!store && places_[buffer].offset % access != 0) return false;
    if (!whole(v[o.offset])) return false;
    if (lookup) return whole(v[o.n]);
    return v[o.feature] == 1 &&
           std::all_of(o.strides.begin(), o.strides.end(), [&](int s) { return whole(v[s]); });
  }

  static bool near(const ColumnClass& c, const CudaClass& k, const Plan::Col& col) {
    for (int i : k.stores) {
      for (int s : c.ops[i].strides) {
        if (col.v[s] < 0 || col.v[s] > INT32_MAX) return false;
      }
    }
    return true;
  }

  // ---- launches ----

  // Takes units from `at` on while one launch can name their buffers. Returns where it stopped.
  size_t add_launch(const std::vector<Unit>& units, size_t at, CudaPlan* out) {
    CudaLaunch launch;
    index_.clear();
    size_t end = at;
    for (; end < units.size(); ++end) {
      if (!name_buffers(units[end], &launch.buffers)) break;
    }
    if (end == at) fail("a column names more buffers than a launch can");
    std::vector<Unit> mine(units.begin() + at, units.begin() + end);
    // Classes together, and what lies side by side in a result next to each other.
    std::stable_sort(mine.begin(), mine.end(), [](const Unit& a, const Unit& b) {
      const Op &s = a.col->cls->ops[a.k->stores.front()], &t = b.col->cls->ops[b.k->stores.front()];
      return std::make_tuple(a.cls, a.col->v[s.buffer], a.col->v[s.offset]) <
             std::make_tuple(b.cls, b.col->v[t.buffer], b.col->v[t.offset]);
    });
    std::vector<int64_t> first_word;
    for (const Unit& u : mine) {
      first_word.push_back(static_cast<int64_t>(launch.words.size()));
      put_words(u, &launch.words);
    }
    const bool vectors =
        std::any_of(mine.begin(), mine.end(), [](const Unit& u) { return u.aligned; });
    launch.tiles = cut(mine, first_word, &launch.words);
    launch.mends = mending(mine, first_word);
    if (vectors) {
      for (size_t i = 0; i < mine.size(); ++i) {
        mine[i].aligned = false;
        if (mine[i].room == 0) continue;
        first_word[i] = static_cast<int64_t>(launch.words.size());  // other tiles, other words
        put_words(mine[i], &launch.words);
      }
      launch.unaligned = cut(mine, first_word, &launch.words);
      launch.unaligned_mends = mending(mine, first_word);
    }
    out->launches.push_back(std::move(launch));
    return end;
  }

  // Adds the unit's buffers to the launch's, unless they are too many.
  bool name_buffers(const Unit& u, std::vector<int>* buffers) {
    const size_t before = buffers->size();
    const auto name = [&](int b) {
      if (index_.emplace(b, static_cast<int>(buffers->size())).second) buffers->push_back(b);
    };
    for (size_t i = 0; i < u.col->cls->slot_kinds.size(); ++i) {
      if (const int b = buffer_of(u, i); b >= 0) name(b);
    }
    if (u.room > 0) name(memory());
    const int most = call_.pointers > 0 ? call_.pointers : recom_cuda::kMaxBuffers;
    if (buffers->size() <= static_cast<size_t>(most)) return true;
    buffers->resize(before);
    return false;
  }

  // Physical operand, or their number + result, or -1 for a slot that names none.
  int buffer_of(const Unit& u, size_t slot) const {
    const int kind = u.col->cls->slot_kinds[slot];
    if (kind == slot_kind::k_OPERAND) return places_[u.col->v[slot]].physical;
    if (kind != slot_kind::k_RESULT) return -1;
    return static_cast<int>(call_.operands.size() + u.col->v[slot]);
  }

  // The same of what tiles that search have found: the result behind the program's.
  int memory() const { return static_cast<int>(call_.operands.size() + results_.size()); }

  void put_words(const Unit& u, std::vector<int64_t>* words) const {
    words->push_back(u.col->bags);
    for (size_t i = 0; i < u.col->cls->slot_kinds.size(); ++i) {
      const int b = buffer_of(u, i);
      if (b < 0) {
        words->push_back(u.col->v[i]);
        continue;
      }
      const bool operand = u.col->cls->slot_kinds[i] == slot_kind::k_OPERAND;
      const int64_t offset = operand ? places_[u.col->v[i]].offset : 0;
      words->push_back(int64_t{index_.at(b)} << recom_cuda::kOffsetBits | offset);
    }
    if (u.room == 0) return;
    words->push_back(int64_t{index_.at(memory())} << recom_cuda::kOffsetBits | u.memory);
    words->resize(words->size() + 2);  // what `put_tiles` says
  }

  // ---- tiles ----

  static UnitShape shape_of(const Unit& u) {
    UnitShape s = u.shape;
    if (!u.aligned) s.vec = 1;
    return s;
  }

  // Whether `b` continues the rows of `a` in the result, all else being equal.
  bool follows(const Unit& a, const Unit& b) const {
    if (a.cls != b.cls || a.aligned != b.aligned || a.shape.bags != b.shape.bags ||
        a.shape.width != b.shape.width || a.shape.positions != b.shape.positions) {
      return false;
    }
    const ColumnClass& c = *a.col->cls;
    const int64_t *x = a.col->v, *y = b.col->v;
    for (int i : a.k->stores) {
      const Op& o = c.ops[i];
      const bool row = c.regs[o.a].width_slot >= 0;
      if (x[o.buffer] != y[o.buffer] || y[o.offset] - x[o.offset] != a.shape.width) return false;
      if (row && (x[o.feature] != 1 || y[o.feature] != 1)) return false;
      for (int s : o.strides) {
        if (x[s] != y[s]) return false;
      }
    }
    return std::all_of(c.outer.begin(), c.outer.end(), [&](int s) { return x[s] == y[s]; });
  }

  // Columns of a class side by side that share tiles.
  struct Group {
    size_t unit;
    int columns;
    Geometry geometry;
    int64_t bags_per_pass, passes;
  };

  std::vector<Tile> cut(const std::vector<Unit>& units, const std::vector<int64_t>& first_word,
                        std::vector<int64_t>* words) {
    double threads = 0;
    for (const Unit& u : units) {
      const UnitShape s = shape_of(u);
      threads += static_cast<double>(s.bags) * recom_cuda::lanes_for(s.form, s.width, s.vec);
    }
    const bool uneven = std::any_of(units.begin(), units.end(), [](const Unit& u) {
      return recom_cuda::is_jagged(u.shape.form);
    });
    const PlanChoice choice = chosen(launch_.choice, uneven, threads, call_.sms);
    std::vector<Group> groups;
    for (size_t i = 0; i < units.size();) {
      size_t end = i + 1;
      while (end < units.size() && follows(units[end - 1], units[end])) ++end;
      const UnitShape s = shape_of(units[i]);
      const Geometry g = geometry(s, threads, call_.sms, choice.slice_positions);
      const int n = columns_per_tile(s, g, units[i].result_bytes, end - i, threads, call_.sms,
                                     choice.run_bytes);
      for (; i < end; i += n) {
        const int columns = static_cast<int>(std::min<size_t>(n, end - i));
        const int64_t per_pass = recom_cuda::kThreads / (g.lanes * g.slices * columns);
        groups.push_back({i, columns, g, per_pass, (s.bags + per_pass - 1) / per_pass});
      }
      i = end;
    }
    double total = 0, passes = 0, left = 0, runs_left = 0;
    for (const Group& g : groups) {
      total += g.geometry.pass_cost * g.passes;
      passes += g.passes;
      // Runs join a bag's parts where tiles end, so that jagged tiles must not depend on a choice
      // of others' tiles: tuning would change the last bits of a sum.
      const Unit& u = units[g.unit];
      if (runs(u)) {
        runs_left += run_cost(u.shape, g.geometry);
      } else if (recom_cuda::is_jagged(u.shape.form)) {
        left += g.geometry.pass_cost * g.passes;
      }
    }
    const double all = left, runs_all = runs_left;
    const int64_t least = 1 + static_cast<int64_t>(passes / kMaxTiles);
    // The heaviest start first, so that none is left over at the end. Jagged tiles shrink on the
    // way.
    std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) {
      return a.geometry.pass_cost > b.geometry.pass_cost;
    });
    std::vector<Tile> tiles;
    for (const Group& g : groups) {
      const Unit& u = units[g.unit];
      if (runs(u)) {
        const int64_t most = std::max(run_bags(u.shape, g.geometry, runs_all, runs_left, call_.sms),
                                      least > 1 ? least * g.bags_per_pass : 1);
        runs_left -= run_cost(u.shape, g.geometry);
        put_tiles(u, g, first_word[g.unit], most, words, &tiles);
        continue;
      }
      const bool jagged = recom_cuda::is_jagged(u.shape.form);
      const int64_t wanted =
          jagged ? jagged_passes(u.shape, g.geometry, g.bags_per_pass, all, left, call_.sms)
                 : passes_per_tile(g.geometry.pass_cost, total, call_.sms, choice.tiles_per_sm);
      const int64_t each = std::max(wanted, least);
      if (jagged) left -= g.geometry.pass_cost * static_cast<double>(g.passes);
      const int64_t n = (g.passes + each - 1) / each;
      const int64_t even = (g.passes + n - 1) / n;  // passes of equal tiles
      put_tiles(u, g, first_word[g.unit], even * g.bags_per_pass, words, &tiles);
    }
    return tiles;
  }

  // Whether a unit's tiles deal out their positions.
  static bool runs(const Unit& u) { return u.shape.form == recom_cuda::kRuns && u.aligned; }

  // Tiles of at most so many bags each.
  static void put_tiles(const Unit& u, const Group& g, int64_t at, int64_t most,
                        std::vector<int64_t>* words, std::vector<Tile>* tiles) {
    if (u.room > 0) most = std::max(most, divided(u.shape.bags, u.room));
    const int64_t n = divided(u.shape.bags, most);
    const int64_t step = runs(u) ? divided(u.shape.bags, n) : most;
    put_equal_tiles(u, g, at, step, tiles);
    if (u.room == 0) return;
    int64_t* const told = words->data() + at + 2 + u.col->cls->slot_kinds.size();
    told[0] = step;
    told[1] = divided(u.shape.bags, step);
  }
  static void put_equal_tiles(const Unit& u, const Group& g, int64_t at, int64_t step,
                              std::vector<Tile>* tiles) {
    for (int64_t bag = 0; bag < u.shape.bags; bag += step) {
      const int bags = static_cast<int>(std::min(step, u.shape.bags - bag));
      tiles->push_back(tile(u, g, at, bag, bags));
    }
  }
  static int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

  // Tiles of recom_mend, for all bags of units that search. It reads no vectors.
  std::vector<Tile> mending(const std::vector<Unit>& units,
                            const std::vector<int64_t>& first_word) const {
    const auto searched =
        std::count_if(units.begin(), units.end(), [](const Unit& u) { return u.room > 0; });
    std::vector<Tile> tiles;
    for (size_t i = 0; i < units.size(); ++i) {
      if (units[i].room == 0) continue;
      Unit u = units[i];
      u.aligned = false;
      const Group g{i, 1, geometry(shape_of(u), 0, call_.sms, 0), 0, 0};
      const int64_t n = mending_tiles(u.shape.bags, ids_of(u), searched, call_.sms);
      put_equal_tiles(u, g, first_word[i], divided(u.shape.bags, n), &tiles);
    }
    return tiles;
  }

  static Tile tile(const Unit& u, const Group& g, int64_t words, int64_t bag, int bags) {
    Tile t{};
    t.words = words;
    t.bag0 = bag;
    t.bags = bags;
    t.cls = u.cls;
    t.columns = static_cast<short>(u.room > 0 ? 0 : g.columns);
    t.lanes = static_cast<short>(g.geometry.lanes);
    t.slices = static_cast<short>(g.geometry.slices);
    t.aligned = u.aligned;
    return t;
  }

  const Program& p_;
  const CudaCall& call_;
  LaunchWords launch_;
  std::vector<Buffer> operands_, results_;
  int64_t free_ = 0;  // bytes of memory that no unit has yet
  std::vector<CudaPlace> places_;
  std::unordered_map<int, int> index_;  // a buffer's index in the launch being made
};

}  // namespace

CudaPlan make_cuda_plan(const Program& program, const CudaCall& call) {
  return Planner(program, call).run();
}

}  // namespace recom
