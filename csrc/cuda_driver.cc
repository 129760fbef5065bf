#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
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

// A device's primary context, retained once and for good.
Context primary_context(const Driver& driver, int ordinal) {
  static std::mutex mutex;
  static auto* contexts = new std::map<int, Context>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto it = contexts->find(ordinal);
  if (it != contexts->end()) return it->second;
  Device device;
  Context context;
  driver.check(driver.device_get(&device, ordinal), "find device " + std::to_string(ordinal));
  driver.check(driver.primary_ctx_retain(&context, device), "open the device's context");
  return (*contexts)[ordinal] = context;
}

}  // namespace

const Driver& Driver::get() {
  static std::mutex mutex;
  static const Driver* instance = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (!instance) instance = open();
  return *instance;
}

void Driver::check(Result code, const std::string& what) const {
  if (code == 0) return;
  const char *name = nullptr, *text = nullptr;
  error_name(code, &name);
  error_string(code, &text);
  throw CudaError("recom_jax: CUDA cannot " + what + ": " + (name ? name : std::to_string(code)) +
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
  driver.check(driver.ctx_set_current(wanted), "switch contexts");
}

DeviceScope::~DeviceScope() { driver_.ctx_set_current(before_); }

}  // namespace recom::cuda
