#include "cuda_nvrtc.h"

#include <dlfcn.h>

#include <mutex>

namespace recom {

using Program = struct _nvrtcProgram*;

// Signatures as in nvrtc.h; they have been the same since CUDA 11.1.
struct Nvrtc::Functions {
  const char* (*error_string)(int);
  int (*version)(int*, int*);
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*destroy)(Program*);
  int (*compile)(Program, int, const char* const*);
  int (*ptx_size)(Program, size_t*);
  int (*ptx)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
};

namespace {

constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

template <typename F>
void resolve(void* library, const char* name, F* out) {
  *out = reinterpret_cast<F>(dlsym(library, name));
  if (!*out) throw CudaError(std::string("recom_jax: NVRTC has no function ") + name);
}

}  // namespace

Nvrtc::Nvrtc(const std::vector<std::string>& paths) {
  std::vector<std::string> names = paths;
  names.insert(names.end(), std::begin(kNames), std::end(kNames));
  void* library = nullptr;
  std::string why;
  for (const std::string& name : names) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library) {
      path_ = name;
      break;
    }
    const char* error = dlerror();
    if (error && why.empty()) why = error;
  }
  if (!library) {
    throw CudaError(
        "recom_jax: NVRTC, which compiles the fused kernel, cannot be loaded (" + why +
        "). Install it: pip install 'jax[cuda13]', or pip install nvidia-cuda-nvrtc, or a CUDA "
        "toolkit whose folder CUDA_HOME names");
  }
  auto f = new Functions;  // lives as long as the process, like the library
  resolve(library, "nvrtcGetErrorString", &f->error_string);
  resolve(library, "nvrtcVersion", &f->version);
  resolve(library, "nvrtcCreateProgram", &f->create);
  resolve(library, "nvrtcDestroyProgram", &f->destroy);
  resolve(library, "nvrtcCompileProgram", &f->compile);
  resolve(library, "nvrtcGetPTXSize", &f->ptx_size);
  resolve(library, "nvrtcGetPTX", &f->ptx);
  resolve(library, "nvrtcGetCUBINSize", &f->cubin_size);
  resolve(library, "nvrtcGetCUBIN", &f->cubin);
  resolve(library, "nvrtcGetProgramLogSize", &f->log_size);
  resolve(library, "nvrtcGetProgramLog", &f->log);
  f_ = f;
}

const Nvrtc& Nvrtc::open(const std::vector<std::string>& paths) {
  static std::mutex mutex;
  static const Nvrtc* instance = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (!instance) instance = new Nvrtc(paths);
  return *instance;
}

void Nvrtc::check(int code, const char* what) const {
  if (code == 0) return;
  throw CudaError(std::string("recom_jax: NVRTC cannot ") + what + ": " + f_->error_string(code));
}

std::pair<int, int> Nvrtc::version() const {
  int major = 0, minor = 0;
  check(f_->version(&major, &minor), "tell its version");
  return {major, minor};
}

NvrtcResult Nvrtc::compile(const NvrtcSource& source) const {
  std::vector<const char*> names, texts, options;
  for (const auto& [name, text] : source.headers) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  for (const std::string& o : source.options) options.push_back(o.c_str());
  struct Owned {
    const Functions* f;
    Program p = nullptr;
    ~Owned() {
      if (p) f->destroy(&p);
    }
  } owned{f_};
  check(f_->create(&owned.p, source.text.c_str(), source.name.c_str(),
                   static_cast<int>(names.size()), texts.data(), names.data()),
        "take the source");
  const int status = f_->compile(owned.p, static_cast<int>(options.size()), options.data());
  const auto fetch = [&](auto size_of, auto get, const char* what) {
    size_t size = 0;
    check(size_of(owned.p, &size), what);
    std::string out(size, '\0');
    if (size) check(get(owned.p, out.data()), what);
    return out;
  };
  const auto text = [](std::string s) {
    while (!s.empty() && s.back() == '\0') s.pop_back();
    return s;
  };
  NvrtcResult out;
  out.log = text(fetch(f_->log_size, f_->log, "hand over its log"));
  if (status != 0) {
    throw CudaError("recom_jax: NVRTC cannot compile " + source.name + ": " +
                    f_->error_string(status) + "\n" + out.log);
  }
  out.image = source.cubin ? fetch(f_->cubin_size, f_->cubin, "hand over the machine code")
                           : text(fetch(f_->ptx_size, f_->ptx, "hand over the PTX"));
  return out;
}

}  // namespace recom
