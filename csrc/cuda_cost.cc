#include "cuda_cost.h"

#include <algorithm>
#include <cmath>

#include "recom_abi.h"

namespace recom {
namespace {

// Costs count trips to memory of one warp. Reading a column's words, then an id, then its row are
// three that depend on each other; the rows of a bag's positions don't, so that a thread keeps some
// in flight.
constexpr double kFixed = 2;
constexpr double kPosition = 0.25;  // an id, and what is computed of it
constexpr double kVector = 0.25;    // 16 bytes of a row
constexpr double kStep = 0.25;      // of a search: its first steps hit the cache
// Positions that a slice of a jagged bag should have: fewer, and combining the slices costs more
// than it saves.
constexpr double kJaggedPositions = 1.4;

// Tiles that deal out their positions: how many a resident block still gets of what is left, and
// what one costs at most. Wide rows are bound by memory: smaller tiles of them are of fewer tables
// at a time, which the second-level cache then holds.
constexpr double kRunShares = 1.5, kMostRunCost = 40000;

// A tile's look at one segment id, in the units of passes and of runs. Where that is most of a
// tile's cost, a multiprocessor has one tile.
constexpr double kLook = 1.0 / 2048, kRunLook = 0.3;

// Blocks that mend, of a multiprocessor.
constexpr int kMendingBlocks = 2;

int floor_power_of_two(double x) {
  int p = 1;
  while (p < 32 && 2 * p <= x) p *= 2;
  return p;
}

// Threads that keep the device busy.
double full(int sms) { return static_cast<double>(sms) * kBlocksPerSm * recom_cuda::kThreads; }

}  // namespace

Geometry geometry(const UnitShape& u, double threads, int sms, double slice_positions) {
  Geometry g;
  g.lanes = recom_cuda::lanes_for(u.form, u.width, u.vec);
  g.slices = 1;
  // Slices shuffle between the lanes of one warp.
  const int most = std::max(32 / g.lanes, 1);
  if (u.form == recom_cuda::kRegion && u.positions > 1) {
    // Short of threads, bags are cut until the device is full; a full one gains nothing from it.
    const int n = recom_cuda::power_of_two(static_cast<int>(std::min(u.positions, 32.0)));
    g.slices = std::min({floor_power_of_two(full(sms) / std::max(threads, 1.0)), n, most});
  } else if (recom_cuda::is_jagged(u.form)) {
    // Lengths differ by bag: slices also even out what the threads of a warp have to do.
    g.slices = std::min(floor_power_of_two(u.positions / (slice_positions > 0 ? slice_positions
                                                                              : kJaggedPositions)),
                        most);
  }
  const double chunks =
      std::ceil(static_cast<double>(u.width) / (static_cast<double>(g.lanes) * u.vec));
  const double vectors = chunks * std::max(u.vec * u.row_bytes / 16.0, 0.25);
  const double per_item = kPosition + vectors * kVector + u.steps * kStep;
  const double items =
      u.form == recom_cuda::kPlain ? 1 : std::ceil(std::max(u.positions, 1.0) / g.slices);
  g.pass_cost = kFixed + items * per_item;
  return g;
}

int columns_per_tile(const UnitShape& u, const Geometry& g, int64_t result_bytes, int64_t run,
                     double threads, int sms, int64_t run_bytes) {
  // Bags of different lengths keep a warp waiting, and a sector (32 bytes) is the least that memory
  // writes: nothing to gain from neighbours.
  if (recom_cuda::is_jagged(u.form) || u.alone) return 1;
  const int64_t each = int64_t{g.lanes} * g.slices;
  int64_t columns = (run_bytes + result_bytes - 1) / std::max<int64_t>(result_bytes, 1);
  // Few bags leave threads idle. A warp is filled in any case, a block only where other blocks fill
  // the device.
  const int64_t fill = threads >= full(sms) ? recom_cuda::kThreads : 32;
  columns = std::max(columns, fill / std::max<int64_t>(each * u.bags, 1));
  return static_cast<int>(
      std::max<int64_t>(std::min({columns, run, recom_cuda::kThreads / each}), 1));
}

int64_t jagged_passes(const UnitShape& u, const Geometry& g, int64_t bags_per_pass, double all,
                      double left, int sms) {
  const double share = left / (2.0 * kJaggedBlocks * sms);
  // Too few bags to fill the device are spread over it: beginnings side by side take no longer.
  const double each = std::ceil(all / (g.pass_cost * sms));
  double passes = std::max(share / g.pass_cost, std::min(each, double{kMaxPasses}));
  if (u.looks * kLook > passes * g.pass_cost) passes = std::max(passes, each);
  const double fit = kStageWords / ((u.positions + 1) * static_cast<double>(bags_per_pass));
  return static_cast<int64_t>(std::max(std::min(passes, fit), 1.0));
}

double run_cost(const UnitShape& u, const Geometry& g) {
  return static_cast<double>(u.bags) * u.positions * (kRunPosition + g.lanes);
}

int64_t run_bags(const UnitShape& u, const Geometry& g, double all, double left, int sms) {
  const double share = left / (kRunShares * kJaggedBlocks * sms);
  const double bag = std::max(u.positions, 1.0) * (kRunPosition + g.lanes);
  const double each = std::ceil(all / (bag * sms));
  double bags = std::max(std::min(share, kMostRunCost) / bag, std::min(each, kLeastRunCost / bag));
  if (u.looks * kRunLook > bags * bag) bags = std::max(bags, each);
  const double fit = kRunStageWords / (u.positions + 1);
  return static_cast<int64_t>(std::max(std::min(bags, fit), 1.0));
}

int64_t mending_tiles(int64_t bags, int64_t ids, int64_t searched, int sms) {
  const int64_t spread = int64_t{kMendingBlocks} * sms / searched;
  return std::clamp<int64_t>(std::max(spread, ids / kMended), 1, bags);
}

PlanChoice chosen(PlanChoice choice, bool uneven, double threads, int sms) {
  const bool even = !uneven && threads >= full(sms);
  if (choice.run_bytes <= 0) choice.run_bytes = even ? kEvenRunBytes : kRunBytes;
  if (choice.tiles_per_sm <= 0) choice.tiles_per_sm = even ? kEvenTilesPerSm : kTilesPerSm;
  return choice;
}

int64_t passes_per_tile(double pass_cost, double total, int sms, int tiles_per_sm) {
  const double target = total / (static_cast<double>(sms) * tiles_per_sm);
  const double passes = std::clamp(target / pass_cost, 1.0, double{kMaxPasses});
  return static_cast<int64_t>(passes);
}

}  // namespace recom
