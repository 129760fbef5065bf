// NVIDIA's run-time compiler, opened when it is first needed: building and importing need no CUDA.

#ifndef RECOM_JAX_CSRC_CUDA_NVRTC_H_
#define RECOM_JAX_CSRC_CUDA_NVRTC_H_

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace recom {

// Something of CUDA is missing or failed. Its text reaches the user.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct NvrtcSource {
  std::string text, name;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
  std::vector<std::string> options;
  bool cubin = false;  // machine code of a real architecture (sm_*) instead of PTX
};

struct NvrtcResult {
  std::string image;  // PTX's text without its closing NUL, or the cubin's bytes
  std::string log;
};

class Nvrtc {
 public:
  // The library, opened once a process: the first of `paths` that loads, then the loader's own.
  // Later calls return the same one whatever their paths. Throws CudaError, and tries again the
  // next time.
  static const Nvrtc& open(const std::vector<std::string>& paths);

  // Throws CudaError with the compiler's log.
  NvrtcResult compile(const NvrtcSource& source) const;

  std::pair<int, int> version() const;
  const std::string& path() const { return path_; }

 private:
  struct Functions;
  explicit Nvrtc(const std::vector<std::string>& paths);
  void check(int code, const char* what) const;

  const Functions* f_ = nullptr;
  std::string path_;
};

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_NVRTC_H_
