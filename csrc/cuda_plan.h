// The CUDA target's plan (docs/cuda_target.md): for one set of shapes, the tiles and column words
// of each launch. Pure computation on the host: no driver, no device.

#ifndef RECOM_JAX_CSRC_CUDA_PLAN_H_
#define RECOM_JAX_CSRC_CUDA_PLAN_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "plan.h"
#include "program.h"
#include "recom_abi.h"

namespace recom {

struct CudaLaunch {
  std::vector<recom_cuda::Tile> tiles;  // for buffers that start at a multiple of kBaseAlignment
  std::vector<recom_cuda::Tile> unaligned;  // for all others; empty if `tiles` use no vectors
  std::vector<int64_t> words;
  std::vector<int> buffers;  // by index in the launch: physical operand, or their number + result
  // Tiles of recom_mend, which follows: for `tiles`, and for `unaligned`. Empty where none search.
  std::vector<recom_cuda::Tile> mends, unaligned_mends;
};

struct CudaPlan {
  std::vector<CudaLaunch> launches;
  bool searches;  // whether the module has recom_mend
};

// The widest access, in bytes.
inline constexpr int kBaseAlignment = 16;

struct CudaCall {
  std::string_view launch;
  const int64_t* layout;
  int64_t n_layout;
  // Only dtypes and dims are read: data may be null. One more result than the program's, of bytes:
  // memory of the execution for what tiles that search have found. Without it none do.
  std::vector<Buffer> operands, results;
  int sms;                     // multiprocessors of the device
  int pointers;                // buffers that one launch may name, 0: any number, in a table
  double slice_positions = 0;  // instead of the launch words' (see PlanChoice), 0: theirs
  int64_t searched_ids = 0;    // instead of kSearchedIds, 0: as many
};

// Throws ProgramError.
CudaPlan make_cuda_plan(const Program& program, const CudaCall& call);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_PLAN_H_
