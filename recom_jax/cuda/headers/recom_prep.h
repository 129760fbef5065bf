// What the host (csrc/corun_runtime.cc) hands a generated preprocessing kernel. Plain C++.

#ifndef RECOM_JAX_CUDA_PREP_H_
#define RECOM_JAX_CUDA_PREP_H_

namespace recom_cuda {

// Elements [first, first + count) of one unit: a part of a result. Its words start at `words`.
struct PrepTile {
  long long first;
  int count;
  int cls;
  int words;
  int unused;
};

// Tiles are taken in turns by however many blocks there are, so the grid alone decides the share of
// the device.
struct PrepParams {
  const PrepTile* tiles;
  const long long* words;
  const unsigned char* in;      // the raw batch
  const unsigned char* consts;  // arrays of the program
  unsigned char* out;           // the results, side by side
  int n_tiles;
  int unused;
};

constexpr int kPrepThreads = 256;

}  // namespace recom_cuda

#endif  // RECOM_JAX_CUDA_PREP_H_
