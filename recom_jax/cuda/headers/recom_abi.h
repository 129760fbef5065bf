// What the host (csrc/cuda_plan.cc) hands the generated kernel. Plain C++: nvcc's run-time compiler, the
// extension and the emulation header of the tests all read this file.

#ifndef RECOM_JAX_CUDA_ABI_H_
#define RECOM_JAX_CUDA_ABI_H_

// Buffers that one launch may name. A kernel's parameters may take 32,764 bytes. 0: any number, in an array on the
// device that kernel recom_point fills.
#ifndef RECOM_POINTERS
#define RECOM_POINTERS 4064
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define RECOM_ABI_FN __host__ __device__
#else
#define RECOM_ABI_FN
#endif

namespace recom_cuda {

constexpr int kThreads = 256;  // of a block

// How a unit's code runs over bags.
enum Form : int {
  kPlain = 0,   // no reduction: each lane computes its features of a bag
  kRegion = 1,  // bags of equally many positions
  kJagged = 2,  // positions find their bag by segment ids
  kRuns = 3,    // likewise, but aligned tiles deal out their positions, not their bags (recom_runs.cuh)
};
// In launch words added to kJagged and kRuns: tiles may search their segment ids (recom_segments.cuh).
constexpr int kSearches = 4;
RECOM_ABI_FN constexpr bool is_jagged(int form) { return form == kJagged || form == kRuns; }

// A block's work: bags [bag0, bag0 + bags) of `columns` columns of one class. The words of column k start
// at `words + k * stride`, where stride is the class's. Columns that share a tile are adjacent in the result.
struct Tile {
  long long words;
  long long bag0;
  int bags;
  int cls;
  short columns;  // 0: one of so many segment ids that the block searches, and looks at a part of them
  short lanes;    // of a bag: lane l holds features [l * vec, (l + 1) * vec) of each chunk
  short slices;   // groups of lanes that share the positions of one bag; a power of two, lanes * slices <= 32 if > 1
  short aligned;  // 1: rows and results allow accesses of a whole vector
};

// A column's words: the number of bags, then the class's slots. IMM and DIM slots hold their value, OPERAND and
// RESULT slots a place: index of the launch's buffer << kOffsetBits | byte offset. Where tiles search, three words follow:
// a place for a byte of each tile, the number of bags of a tile (the last one has what is left), and of tiles.
constexpr int kOffsetBits = 44;
constexpr int kMaxBuffers = 1 << 19;  // what is left for an index, the sign not used

struct Params {
  const Tile* tiles;
  const long long* words;
#if RECOM_POINTERS > 0
  const unsigned char* buffer[RECOM_POINTERS];
#else
  const unsigned char* const* buffer;
#endif
};

// Parameters of recom_point: addresses for `to[0, n)`. They are copied when the launch is recorded, so a CUDA graph that
// is launched much later still has them.
#ifndef RECOM_POINTED
#define RECOM_POINTED 4080
#endif
constexpr int kPointed = RECOM_POINTED;
struct Pointing {
  const unsigned char** to;
  long long n;
  const unsigned char* address[kPointed];
};

RECOM_ABI_FN constexpr int power_of_two(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// Lanes that a bag of `width` features takes in vectors of `vec` elements. Reductions shuffle between lanes, so
// theirs are a power of two and fit a warp; wider rows take several passes.
RECOM_ABI_FN constexpr int lanes_for(int form, long long width, int vec) {
  const long long n = width <= vec ? 1 : (width + vec - 1) / vec;
  if (form == kPlain) return n < kThreads ? static_cast<int>(n) : kThreads;
  return n < 32 ? power_of_two(static_cast<int>(n)) : 32;
}

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_ABI_H_
