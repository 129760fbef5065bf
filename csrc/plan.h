// A plan: a program resolved for one set of buffer shapes and one number of threads. Everything
// that depends on sizes is computed and bounds-checked here once; a call with the same shapes only
// supplies pointers.

#ifndef RECOM_JAX_CSRC_PLAN_H_
#define RECOM_JAX_CSRC_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"

namespace recom {

// A typed array of the call; dims live with the caller.
struct Buffer {
  void* data;
  const int64_t* dims;
  int rank;
  int dtype;
};

// Positions in a chunk of a region: registers of this length stay in the first-level cache.
inline constexpr int64_t kMaxChunk = 512;
// Bags in a tile of columns that are copied side by side, and how many bytes wide they are at most.
inline constexpr int64_t kGroupTile = 128;
inline constexpr int64_t kGroupBytes = 512;
// Bags in a tile of a column without jagged regions.
inline constexpr int64_t kMaxTile = 128;
// A result with more bytes for each thread does not stay in their second-level caches, and its
// lines are written past them.
inline constexpr int64_t kStreamBytes = 2 << 20;

class Plan {
 public:
  struct Col {
    const ColumnClass* cls;
    const int64_t* v;  // slots (dims resolved), then derived words
    int64_t bags;
    int64_t tile;         // bags that its registers hold
    int64_t chunk;        // positions that its registers hold
    int64_t temp;         // offset of the temporaries in the scratch
    int64_t temp_each;    // bytes of each of three
    int group = 1;        // columns from this one on whose rows lie side by side in the result
    bool stream = false;  // a group's rows are written past the caches
  };
  // Columns [col0, col1) by bags [bag0, bag1).
  struct Chunk {
    int col0, col1;
    int64_t bag0, bag1;
  };
  // A table of a ONE_HOT lookup, to be scanned for non-finite values.
  struct Scan {
    int operand, dtype;
    int64_t base, row_stride, rows, width;
    bool operator==(const Scan& o) const {
      return operand == o.operand && base == o.base && row_stride == o.row_stride &&
             rows == o.rows && width == o.width;
    }
  };

  // The program owns its plans, so a plan only refers to it.
  Plan(const Program& program, const std::vector<Buffer>& operands,
       const std::vector<Buffer>& results, int threads);
  bool matches(const std::vector<Buffer>& operands, const std::vector<Buffer>& results,
               int threads) const;

  std::vector<Col> cols;
  std::vector<Chunk> chunks;
  std::vector<Scan> scans;
  int64_t scratch_bytes = 0;
  int64_t max_regs = 0;
  bool small = false;  // not worth a second thread

 private:
  struct Builder;

  int threads_;
  std::vector<int64_t> shapes_;  // every dim of every buffer
  std::vector<int64_t> words_;
};

// The program's plan for these shapes, from its small cache. Throws ProgramError.
std::shared_ptr<const Plan> plan_for(const Program& program, const std::vector<Buffer>& operands,
                                     const std::vector<Buffer>& results, int threads);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_PLAN_H_
