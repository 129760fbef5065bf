// What the compiler hands the CUDA target beside the program (docs/cuda_target.md): the launch
// words, which say what units the generated kernel has, and the layout, which says where virtual
// operands lie.

#ifndef RECOM_JAX_CSRC_CUDA_LAUNCH_H_
#define RECOM_JAX_CSRC_CUDA_LAUNCH_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda_cost.h"
#include "plan.h"
#include "program.h"

namespace recom {

inline constexpr int64_t kLaunchMagic = 0x48434e554c4d4352;
inline constexpr int64_t kLaunchVersion = 1;
inline constexpr int64_t kTunedVersion =
    2;  // has a PlanChoice, behind the numbers of classes and units

// A class of the kernel: a program class's code for the stores of one width.
struct CudaClass {
  int program_class;
  int form;        // recom_cuda::Form
  int width_slot;  // -1: scalar
  int vec;
  bool searches;  // tiles may search their segment ids; the kernel can mend what they got wrong
  std::vector<int>
      ops;  // of the program class, those that this width's stores need, stores included
  std::vector<int> stores;  // among them
};

struct CudaUnit {
  int column;
  int cls;  // of LaunchWords::classes
};

struct LaunchWords {
  std::vector<CudaClass> classes;
  std::vector<CudaUnit> units;
  PlanChoice choice;
};

// Reads and checks launch words against their program. Throws ProgramError.
LaunchWords decode_launch(const Program& program, std::string_view bytes);

// A virtual operand's place: physical operand and byte offset.
struct CudaPlace {
  int physical;
  int64_t offset;
};

// Virtual operands from the layout attribute; their dims point into `layout` or `physical`. Throws
// ProgramError.
void bind_layout(const Program& program, const std::vector<Buffer>& physical, const int64_t* layout,
                 int64_t n_layout, std::vector<Buffer>* operands, std::vector<CudaPlace>* places);

// Throws ProgramError if the buffers are not what the program says.
void check_results(const Program& program, const std::vector<Buffer>& results);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_LAUNCH_H_
