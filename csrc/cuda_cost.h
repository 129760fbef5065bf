// The analytic cost model of the CUDA target: how a unit's work is laid over threads, and what a
// pass of a block costs. Every constant that a measurement may change is here and in cuda_cost.cc.

#ifndef RECOM_JAX_CSRC_CUDA_COST_H_
#define RECOM_JAX_CSRC_CUDA_COST_H_

#include <cstdint>

namespace recom {

// Blocks of 256 threads that an SM holds at most (2,048 threads).
inline constexpr int kBlocksPerSm = 8;
// Tiles aimed at: twice what is resident, so that the last ones to finish are short against the
// whole; as many as are resident where a launch fills the device with bags of one length.
inline constexpr int kTilesPerSm = 2 * kBlocksPerSm, kEvenTilesPerSm = kBlocksPerSm;
// A block amortises reading its words over passes; more than a few make the tail long.
inline constexpr int kMaxPasses = 8;
// Blocks with jagged bags that an SM really holds, for their registers.
inline constexpr int kJaggedBlocks = 5;
// Positions and bags that a tile of jagged bags aims at, at most: with some to spare, 4-byte ids
// and limits of so many fit its stage of shared memory (kStageBytes in recom_stage.cuh).
inline constexpr double kStageWords = 3580;
// Tiles that deal out their positions: what a position costs beside the lanes of its row, what a
// tile should cost at least, for its beginning takes as long as half of that, and words as above
// for the larger stage of such kernels (runs.py).
inline constexpr double kRunPosition = 4, kLeastRunCost = 10000, kRunStageWords = 5370;
// Segment ids of a column from which on its tiles search instead of looking at all of them: then
// recom_mend follows, which takes as long as a look at about so many. A tile that searches has at
// least kLeastSearched of them, for a byte of memory each; one that mends has room for those of its
// bags, and aims at kMended.
inline constexpr int64_t kSearchedIds = 32768, kLeastSearched = 256, kMended = 2048;
// A store's run of adjacent columns: a whole cache line, or two sectors of 32 bytes, likewise.
inline constexpr int64_t kRunBytes = 128, kEvenRunBytes = 64;

// What may be chosen otherwise than the model does, where that was measured to be faster. 0: the
// model's choice.
struct PlanChoice {
  double slice_positions = 0;  // that a slice of a jagged bag has at least
  int64_t run_bytes = 0;       // of adjacent columns in a tile
  int tiles_per_sm = 0;        // aimed at
};

// What the model knows of a unit.
struct UnitShape {
  int form;       // recom_cuda::Form
  int vec;        // elements of a lane's vector
  int64_t width;  // features; 1 for scalars
  int64_t bags;
  double positions;  // of a bag: exact for regions, the average for jagged ones, 0 for plain code
  double steps;      // dependent steps of searches, per bag or per position
  double looks;      // segment ids that each tile looks at before its first bag
  int row_bytes;     // of one feature of the widest row read, 0 if none is
  bool alone;        // its code has a block work on one column at a time
};

struct Geometry {
  int lanes, slices;
  double pass_cost;  // of a block that runs all its threads once
};

// `threads`: what the whole launch has with one slice a bag; `sms`: of the device.
// `slice_positions`: what a slice of a jagged bag should have at least, 0: the model's choice.
Geometry geometry(const UnitShape& unit, double threads, int sms, double slice_positions);

// Columns of a run of `run` that share a tile, given one row's bytes in the result.
int columns_per_tile(const UnitShape& unit, const Geometry& g, int64_t result_bytes, int64_t run,
                     double threads, int sms, int64_t run_bytes);

// Passes of a tile of jagged bags, with `left` of the cost of all the launch's not yet cut: half of
// what a block's share of it is, so that tiles shrink towards the end, but no fewer than pay for a
// tile's beginning, if every multiprocessor has that many. (Guided self-scheduling,
// Polychronopoulos and Kuck 1987.)
int64_t jagged_passes(const UnitShape& unit, const Geometry& g, int64_t bags_per_pass, double all,
                      double left, int sms);

// Bags of a tile that deals out its positions, likewise. `all`, `left`: of run_cost.
int64_t run_bags(const UnitShape& unit, const Geometry& g, double all, double left, int sms);
// What all bags of a unit cost so.
double run_cost(const UnitShape& unit, const Geometry& g);

// Tiles that mend a unit of `searched` that search: enough to fill the device, and no more than are
// needed, as each looks at all ids if it has anything to do.
int64_t mending_tiles(int64_t bags, int64_t ids, int64_t searched, int sms);

// What is left to the model in `choice`. `uneven`: some bags are jagged.
PlanChoice chosen(PlanChoice choice, bool uneven, double threads, int sms);

// Passes of a tile so that a launch of `total` cost has about that many tiles an SM.
int64_t passes_per_tile(double pass_cost, double total, int sms, int tiles_per_sm);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_COST_H_
