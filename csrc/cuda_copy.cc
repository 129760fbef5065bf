#include "cuda_copy.h"

#include <map>
#include <mutex>

namespace recom {
namespace {

constexpr size_t kVector = 16;  // bytes of a thread
constexpr unsigned kThreads = 256;

// The last thread copies what is left byte by byte. Any driver that runs here knows this version.
constexpr const char* kText = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry recom_copy(.param .u64 p_to, .param .u64 p_from, .param .u64 p_n)
{
  .reg .pred %p<4>;
  .reg .b16 %h<2>;
  .reg .b32 %r<8>;
  .reg .b64 %d<10>;
  ld.param.u64 %d1, [p_to];
  ld.param.u64 %d2, [p_from];
  ld.param.u64 %d3, [p_n];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mul.wide.u32 %d4, %r1, %r2;
  cvt.u64.u32 %d5, %r3;
  add.s64 %d4, %d4, %d5;
  shl.b64 %d4, %d4, 4;
  setp.ge.u64 %p1, %d4, %d3;
  @%p1 bra DONE;
  add.s64 %d6, %d1, %d4;
  add.s64 %d7, %d2, %d4;
  sub.s64 %d8, %d3, %d4;
  setp.lt.u64 %p2, %d8, 16;
  @%p2 bra TAIL;
  ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%d7];
  st.global.v4.u32 [%d6], {%r4, %r5, %r6, %r7};
  bra DONE;
TAIL:
  ld.global.u8 %h1, [%d7];
  st.global.u8 [%d6], %h1;
  add.s64 %d6, %d6, 1;
  add.s64 %d7, %d7, 1;
  sub.s64 %d8, %d8, 1;
  setp.ne.u64 %p3, %d8, 0;
  @%p3 bra TAIL;
DONE:
  ret;
}
)";

// A device's kernel, loaded once and for good; null where the driver does not take it.
cuda::Function kernel_of(const cuda::Driver& driver, int device) {
  static std::mutex mutex;
  static auto* kernels = new std::map<int, cuda::Function>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto it = kernels->find(device);
  if (it != kernels->end()) return it->second;
  cuda::Module module;
  cuda::Function found = nullptr;
  if (driver.module_load(&module, kText, 0, nullptr, nullptr) != 0 ||
      driver.module_function(&found, module, "recom_copy") != 0) {
    found = nullptr;
  }
  return (*kernels)[device] = found;
}

}  // namespace

void copy_on_device(int device, cuda::Pointer to, cuda::Pointer from, size_t n,
                    cuda::Stream stream) {
  const cuda::Driver& driver = cuda::Driver::get();
  const bool vectors = (to | from) % kVector == 0 && n > 0 && n < (size_t{1} << 40);
  const cuda::Function kernel = vectors ? kernel_of(driver, device) : nullptr;
  if (!kernel) {
    driver.check(driver.copy_on_device_async(to, from, n, stream), "copy a batch on the device");
    return;
  }
  unsigned long long words[] = {to, from, n};
  void* arguments[] = {&words[0], &words[1], &words[2]};
  const size_t each = kVector * kThreads;
  driver.check(driver.launch(kernel, static_cast<unsigned>((n + each - 1) / each), 1, 1, kThreads,
                             1, 1, 0, stream, arguments, nullptr),
               "launch a copy on the device");
}

}  // namespace recom
