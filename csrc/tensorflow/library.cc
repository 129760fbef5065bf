// The shared library for TensorFlow: when it is loaded, it registers the CPU's handlers with the
// XLA inside TensorFlow. It is built on the user's machine against TensorFlow's own headers
// (recom_jax/tensorflow_library.py): a handler is refused by a runtime whose FFI is older than the
// headers it was built with.
//
// Nothing of TensorFlow is linked, so that one library serves the Python package, whose XLA is in a
// library of its own, and a server that has XLA in its executable.

#include <dlfcn.h>

#include <cstdint>
#include <string>

#include "../ffi_handler.h"
#include "../interp.h"
#include "xla/ffi/api/c_api.h"

// Found by the linker where all is linked into one server, else null.
namespace xla::ffi {
__attribute__((weak, visibility("default"))) const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace {

constexpr const char* kGetApi = "_ZN3xla3ffi12GetXlaFfiApiEv";  // xla::ffi::GetXlaFfiApi()
using GetApi = const XLA_FFI_Api* (*)();

// XLA's interface; null where this process has no TensorFlow.
const XLA_FFI_Api* find_api() {
  for (const char* name : {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2"}) {
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) {
      void* found = dlsym(library, kGetApi);
      dlclose(library);  // it stays: somebody else has loaded it
      if (found != nullptr) return reinterpret_cast<GetApi>(found)();
    }
  }
  if (xla::ffi::GetXlaFfiApi != nullptr) return xla::ffi::GetXlaFfiApi();
  void* found = dlsym(RTLD_DEFAULT, kGetApi);
  return found == nullptr ? nullptr : reinterpret_cast<GetApi>(found)();
}

// "" or what XLA says.
std::string register_handler(const XLA_FFI_Api* api, const std::string& name, void* handler) {
  XLA_FFI_Handler_Register_Args args = {};
  args.struct_size = XLA_FFI_Handler_Register_Args_STRUCT_SIZE;
  args.name = {name.data(), name.size()};
  args.platform = {"Host", 4};
  args.bundle.execute = reinterpret_cast<XLA_FFI_Handler*>(handler);
  XLA_FFI_Error* error = api->XLA_FFI_Handler_Register(&args);
  if (error == nullptr) return "";
  XLA_FFI_Error_GetMessage_Args message = {};
  message.struct_size = XLA_FFI_Error_GetMessage_Args_STRUCT_SIZE;
  message.error = error;
  api->XLA_FFI_Error_GetMessage(&message);
  const std::string text = message.message;
  XLA_FFI_Error_Destroy_Args destroy = {};
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  api->XLA_FFI_Error_Destroy(&destroy);
  return name + ": " + text;
}

std::string register_all(const XLA_FFI_Api* api) {
  if (api == nullptr) {
    return "this process has no TensorFlow, or one without XLA's FFI (xla::ffi::GetXlaFfiApi): "
           "load "
           "TensorFlow first";
  }
  const struct {
    const char* name;
    void* handler;
  } all[] = {{"recom_fused_v1", recom::fused_v1_handler()},
             {"recom_row_sums_v1", recom::row_sums_v1_handler()},
             {"recom_empty_v1", recom::empty_v1_handler()}};
  for (const auto& [name, handler] : all) {
    const std::string error = register_handler(api, name, handler);
    if (!error.empty()) return error;
  }
  return "";
}

const std::string& status() {
  static const std::string text = register_all(find_api());
  return text;
}

// At load time.
const bool kLoaded = (status(), true);

}  // namespace

// "" if the handlers are registered, else why not.
extern "C" __attribute__((visibility("default"))) const char* recom_tensorflow_status() {
  return status().c_str();
}

// How many fused calls have run in this process.
extern "C" __attribute__((visibility("default"))) int64_t recom_tensorflow_calls() {
  return recom::stats().calls.load();
}

// The minor version of the FFI that the library was built for.
extern "C" __attribute__((visibility("default"))) int recom_tensorflow_ffi_minor() {
  return XLA_FFI_API_MINOR;
}
