// The CUDA driver, opened when it is first needed: building and importing need no CUDA. What is
// declared here is what cuda.h declares, for the few functions in use.

#ifndef RECOM_JAX_CSRC_CUDA_DRIVER_H_
#define RECOM_JAX_CSRC_CUDA_DRIVER_H_

#include <cstddef>
#include <string_view>

#include "cuda_nvrtc.h"  // CudaError

namespace recom::cuda {

using Result = int;  // 0: success
using Device = int;
using Pointer = unsigned long long;
using Context = struct CUctx_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;

inline constexpr Result kNotReady = 600;

// CUdevice_attribute, CUfunction_attribute, CUjit_option, flags.
inline constexpr int kMultiprocessors = 16, kCapabilityMajor = 75, kCapabilityMinor = 76;
inline constexpr int kSharedOfProcessor = 81, kRegistersOfProcessor = 82;
inline constexpr int kSharedBytes = 1, kRegisters = 4, kCarveout = 9;
inline constexpr int kJitInfoLog = 3, kJitInfoLogSize = 4, kJitErrorLog = 5, kJitErrorLogSize = 6;
inline constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kHostPortable = 1;
inline constexpr unsigned kEventRecordExternal = 1;

// clang-format off
// member, symbol, parameters
#define RECOM_DRIVER_FUNCTIONS(X)                                                                                \
  X(init, "cuInit", (unsigned))                                                                                  \
  X(driver_version, "cuDriverGetVersion", (int*))                                                                \
  X(error_name, "cuGetErrorName", (Result, const char**))                                                        \
  X(error_string, "cuGetErrorString", (Result, const char**))                                                    \
  X(device_get, "cuDeviceGet", (Device*, int))                                                                   \
  X(device_count, "cuDeviceGetCount", (int*))                                                                    \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, Device))                                               \
  X(device_name, "cuDeviceGetName", (char*, int, Device))                                                        \
  X(ctx_get_current, "cuCtxGetCurrent", (Context*))                                                              \
  X(ctx_set_current, "cuCtxSetCurrent", (Context))                                                               \
  X(ctx_get_device, "cuCtxGetDevice", (Device*))                                                                 \
  X(primary_ctx_retain, "cuDevicePrimaryCtxRetain", (Context*, Device))                                          \
  X(module_load, "cuModuleLoadDataEx", (Module*, const void*, unsigned, int*, void**))                           \
  X(module_unload, "cuModuleUnload", (Module))                                                                   \
  X(module_function, "cuModuleGetFunction", (Function*, Module, const char*))                                    \
  X(function_attribute, "cuFuncGetAttribute", (int*, int, Function))                                             \
  X(set_function_attribute, "cuFuncSetAttribute", (Function, int, int))                                          \
  X(launch, "cuLaunchKernel", (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,   \
                               Stream, void**, void**))                                                          \
  X(mem_alloc, "cuMemAlloc_v2", (Pointer*, size_t))                                                              \
  X(mem_free, "cuMemFree_v2", (Pointer))                                                                         \
  X(host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                                    \
  X(host_free, "cuMemFreeHost", (void*))                                                                         \
  X(host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))                                            \
  X(host_unregister, "cuMemHostUnregister", (void*))                                                             \
  X(copy_to_device_async, "cuMemcpyHtoDAsync_v2", (Pointer, const void*, size_t, Stream))                        \
  X(copy_on_device_async, "cuMemcpyDtoDAsync_v2", (Pointer, Pointer, size_t, Stream))                            \
  X(copy_to_host_async, "cuMemcpyDtoHAsync_v2", (void*, Pointer, size_t, Stream))                                \
  X(stream_capturing, "cuStreamIsCapturing", (Stream, int*))                                                     \
  X(stream_create, "cuStreamCreate", (Stream*, unsigned))                                                        \
  X(stream_create_priority, "cuStreamCreateWithPriority", (Stream*, unsigned, int))                              \
  X(stream_priorities, "cuCtxGetStreamPriorityRange", (int*, int*))                                              \
  X(stream_synchronize, "cuStreamSynchronize", (Stream))                                                         \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                                              \
  X(mem_set_async, "cuMemsetD8Async", (Pointer, unsigned char, size_t, Stream))                                  \
  X(host_function, "cuLaunchHostFunc", (Stream, void (*)(void*), void*))                                         \
  X(event_elapsed, "cuEventElapsedTime", (float*, Event, Event))                                                 \
  X(stream_wait_event, "cuStreamWaitEvent", (Stream, Event, unsigned))                                           \
  X(event_create, "cuEventCreate", (Event*, unsigned))                                                           \
  X(event_record, "cuEventRecord", (Event, Stream))                                                              \
  X(event_record_flags, "cuEventRecordWithFlags", (Event, Stream, unsigned))                                     \
  X(event_query, "cuEventQuery", (Event))                                                                        \
  X(event_synchronize, "cuEventSynchronize", (Event))                                                            \
  X(event_destroy, "cuEventDestroy_v2", (Event))
// clang-format on

struct Driver {
#define RECOM_MEMBER(member, symbol, parameters) Result(*member) parameters = nullptr;
  RECOM_DRIVER_FUNCTIONS(RECOM_MEMBER)
#undef RECOM_MEMBER

  // Opened and initialised once a process. Throws CudaError saying what is missing; the next call
  // tries again.
  static const Driver& get();

  // Throws CudaError if `code` is an error: "recom_jax: CUDA cannot <what>: ...".
  void check(Result code, std::string_view what) const {
    if (code != 0) fail(code, what);
  }
  [[noreturn]] void fail(Result code, std::string_view what) const;
  int attribute(int attribute, Device device) const;
  // Asks for as much shared memory of a multiprocessor as the blocks need that its registers hold:
  // the driver provides for as many as threads would allow, and the first-level cache is what is
  // left. A hint: nothing is said where the driver doesn't take it. percent: another share instead.
  void spare_cache(Function kernel, int device, int threads, int percent = -1) const;
};

// Makes a device's primary context (the one XLA uses) current for a scope.
class DeviceScope {
 public:
  DeviceScope(const Driver& driver, int ordinal);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const Driver& driver_;
  Context before_ = nullptr;
  bool switched_ = false;
};

}  // namespace recom::cuda

#endif  // RECOM_JAX_CSRC_CUDA_DRIVER_H_
