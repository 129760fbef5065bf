// The interpreter proper: one column, one range of bags.

#ifndef RECOM_JAX_CSRC_EXEC_H_
#define RECOM_JAX_CSRC_EXEC_H_

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace recom {

// What a ONE_HOT lookup must know of a table that holds non-finite values.
struct NonFinite {
  bool any = false;
  std::vector<int64_t> per_feature;  // rows that are non-finite there
};

class Exec {
 public:
  Exec(const Kernels& kernels, const std::vector<Buffer>& operands,
       const std::vector<Buffer>& results, const std::vector<NonFinite>& scans, char* scratch,
       char** regs)
      : k_(kernels),
        operands_(operands),
        results_(results),
        scans_(scans),
        scratch_(scratch),
        reg_(regs) {}

  void column(const Plan::Col& col, int64_t bag0, int64_t bag1);
  // `n` plain lookup columns whose rows lie side by side (Plan::Col::group). The columns up to
  // `end` come after them, for the same bags.
  void columns(const Plan::Col* cols, int n, const Plan::Col* end, int64_t bag0, int64_t bag1);
  // Some lookup met an index that is neither inside its table nor -1 or -2.
  bool bad_index() const { return bad_index_; }

 private:
  // `count` items from global item `start`; what both mean depends on the space.
  void run(int begin, int end, int64_t start, int64_t count);
  void region(const Op& o, int self);
  void jagged(const Op& o, int self);
  void step(const Op& o, int64_t start, int64_t count);

  // Asks for a column's inputs of these bags.
  void prefetch_inputs(const Plan::Col& col, int64_t bag, int64_t bags) const;
  void load(const Op& o, int64_t start, int64_t count);
  void affine(const Op& o, int64_t start, int64_t count);
  void expand(const Op& o, int64_t start, int64_t count);
  void binary_op(const Op& o, int64_t count);
  void select(const Op& o, int64_t count);
  void bag_of(const Op& o, int64_t count);
  void take(const Op& o, int64_t count);
  void store(const Op& o);
  void reduce(const Op& o, int64_t start, int64_t count);
  // Asks for the rows that items [item, end) of the chunk look up. Returns `end`.
  int64_t prefetch_rows(const Op& o, const TableRef& t, int64_t item, int64_t end) const;
  // Bags [bag, bag + bags) of the tile, each with `positions` items, from item `item` of the chunk.
  void reduce_run(const Op& o, int64_t bag, int64_t bags, int64_t item, int64_t positions,
                  bool first);
  void start_reductions(int begin, int end);
  void finish_reductions(int begin, int end);
  void finish_one_hot(const Op& o);

  // Where rows of `o` (a TAKE or POOL) go: its register, or the result it writes through to.
  struct Dest {
    char* base;     // of the tile's first bag
    int64_t pitch;  // elements between bags
  };
  Dest destination(const Op& o);
  TableRef table(const Op& o);

  int64_t width(int r) const {
    const int s = col_->cls->regs[r].width_slot;
    return s < 0 ? 1 : col_->v[s];
  }
  const Register& info(int r) const { return col_->cls->regs[r]; }
  // Points the register at its own memory, which the caller is about to fill.
  char* own(int r) { return reg_[r] = scratch_ + col_->v[info(r).word]; }
  char* temp(int i) { return scratch_ + col_->temp + i * col_->temp_each; }
  // The register's elements as rows as wide as `dst`.
  const char* spread(int r, int dst, int64_t count, int slot);

  const Kernels& k_;
  const std::vector<Buffer>& operands_;
  const std::vector<Buffer>& results_;
  const std::vector<NonFinite>& scans_;
  char* scratch_;
  char** reg_;
  const Plan::Col* col_ = nullptr;
  int64_t bag0_ = 0, bags_ = 0;    // the tile
  int64_t inner_ = 0;              // positions per bag of the current region
  const int64_t* segs_ = nullptr;  // or, if jagged, the chunk's segs
  bool bad_index_ = false;
  // Bags and rows selected by the region's one-hot pools whose tables are not finite.
  struct Selected {
    const Op* op;
    int64_t bag, row;
  };
  std::vector<Selected> selected_;
  // Where bags start, ascending, for each of the column's searches that asked.
  struct Starts {
    const Plan::Col* col;
    const Op* op;
    std::vector<int32_t> at;
  };
  const std::vector<int32_t>& starts(const Op& o);
  std::vector<Starts> starts_;
};

}  // namespace recom

#endif  // RECOM_JAX_CSRC_EXEC_H_
