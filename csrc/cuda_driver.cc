#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>

namespace recom::cuda {
namespace {

// Leaves a driver behind only if all of it works.
Driver* open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    throw CudaError(std::string("recom_jax: the CUDA driver cannot be loaded (") +
                    (why ? why : "no libcuda.so.1") +
                    "). It comes with NVIDIA's GPU driver; in a container it needs the NVIDIA "
                    "container runtime");
  }
  auto driver = std::make_unique<Driver>();
  const auto resolve = [&](auto* member, const char* symbol) {
    *member = reinterpret_cast<std::remove_pointer_t<decltype(member)>>(dlsym(library, symbol));
    if (!*member) {
      throw CudaError(std::string("recom_jax: the CUDA driver has no function ") + symbol +
                      "; a driver of CUDA 12.1 or newer is needed");
    }
  };
#define RECOM_RESOLVE(member, symbol, parameters) resolve(&driver->member, symbol);
  RECOM_DRIVER_FUNCTIONS(RECOM_RESOLVE)
#undef RECOM_RESOLVE
  driver->check(driver->init(0), "start");
  return driver.release();
}

// A device's primary context, retained once and for good: a thread that retains one that another
// thread has just retained only counts it twice.
Context primary_context(const Driver& driver, int ordinal) {
  static std::array<std::atomic<Context>, 64> contexts{};
  const bool kept = ordinal >= 0 && ordinal < static_cast<int>(contexts.size());
  Context context = kept ? contexts[ordinal].load(std::memory_order_acquire) : nullptr;
  if (context) return context;
  Device device;
  driver.check(driver.device_get(&device, ordinal), "find device " + std::to_string(ordinal));
  driver.check(driver.primary_ctx_retain(&context, device), "open the device's context");
  if (kept) contexts[ordinal].store(context, std::memory_order_release);
  return context;
}

}  // namespace

const Driver& Driver::get() {
  static std::mutex mutex;
  static std::atomic<const Driver*> instance{nullptr};
  if (const Driver* opened = instance.load(std::memory_order_acquire)) return *opened;
  std::lock_guard<std::mutex> lock(mutex);
  const Driver* opened = instance.load(std::memory_order_relaxed);
  if (!opened) {
    opened = open();
    instance.store(opened, std::memory_order_release);
  }
  return *opened;
}

void Driver::fail(Result code, std::string_view what) const {
  const char *name = nullptr, *text = nullptr;
  error_name(code, &name);
  error_string(code, &text);
  throw CudaError("recom_jax: CUDA cannot " + std::string(what) + ": " +
                  (name ? name : std::to_string(code)) +
                  (text ? std::string(" (") + text + ")" : std::string()));
}

int Driver::attribute(int attribute, Device device) const {
  int value = 0;
  check(device_attribute(&value, attribute, device), "tell a device's properties");
  return value;
}

void Driver::spare_cache(Function kernel, int ordinal, int threads, int percent) const {
  constexpr int kOwn = 1024, kGranule = 256;  // of each block; registers of a warp
  Device device;
  int shared = 0, registers = 0, all_shared = 0, all_registers = 0;
  if (device_get(&device, ordinal) != 0 || function_attribute(&shared, kSharedBytes, kernel) != 0 ||
      function_attribute(&registers, kRegisters, kernel) != 0 ||
      device_attribute(&all_shared, kSharedOfProcessor, device) != 0 ||
      device_attribute(&all_registers, kRegistersOfProcessor, device) != 0) {
    return;
  }
  if (percent < 0) {
    if (shared == 0 || registers == 0 || all_shared == 0) return;
    const int warp = (registers * 32 + kGranule - 1) / kGranule * kGranule;
    const int blocks = all_registers / (warp * (threads / 32));
    percent = std::min((blocks * (shared + kOwn) * 100 + all_shared - 1) / all_shared, 100);
  }
  set_function_attribute(kernel, kCarveout, percent);
}

DeviceScope::DeviceScope(const Driver& driver, int ordinal) : driver_(driver) {
  const Context wanted = primary_context(driver, ordinal);
  driver.check(driver.ctx_get_current(&before_), "tell the current context");
  switched_ = before_ != wanted;  // XLA calls handlers in the context that they want
  if (switched_) driver.check(driver.ctx_set_current(wanted), "switch contexts");
}

DeviceScope::~DeviceScope() {
  if (switched_) driver_.ctx_set_current(before_);
}

}  // namespace recom::cuda
