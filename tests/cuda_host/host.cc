// What XLA and the CUDA driver are to the handlers of CUDA, without either: a driver that counts
// its calls and keeps the last launch, and call frames as XLA's custom call thunk makes them. Tests
// load it as libcuda.so.1, before the extension, so that the extension's `operator new` is the
// counting one below.

#include "host.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct XLA_FFI_Error {
  std::string message;
};

namespace {

// Plain counters: everything runs on one thread.
int64_t allocations = 0;
std::map<std::string, int64_t>& counts() {
  static auto* c = new std::map<std::string, int64_t>;
  return *c;
}
std::string order;  // the names of the calls that were counted
bool counting = false;

void* context = nullptr;  // the current one
unsigned grid = 0;
std::vector<uint64_t> words;
int64_t n_words = 0;
int capturing = 0;
bool refused = false;  // modules are

}  // namespace

int fake::called(const char* symbol) {
  if (counting) {
    counting = false;  // the map's own memory is not the handlers'
    const int64_t before = allocations;
    ++counts()[symbol];
    order.append(symbol).append(" ");
    allocations = before;
    counting = true;
  }
  return 0;
}

__attribute__((visibility("default"))) void* operator new(size_t n) {
  ++allocations;
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
__attribute__((visibility("default"))) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((visibility("default"))) void operator delete(void* p, size_t) noexcept {
  std::free(p);
}

// ---- the driver's functions that have something to say ----

EXPORTED int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return fake::called("cuDeviceGet");
}
EXPORTED int cuDeviceGetCount(int* n) {
  *n = 2;
  return fake::called("cuDeviceGetCount");
}
EXPORTED int cuDeviceGetAttribute(int* value, int, int) {
  *value = 132;
  return fake::called("cuDeviceGetAttribute");
}
EXPORTED int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = reinterpret_cast<void*>(static_cast<intptr_t>(device + 1));
  return fake::called("cuDevicePrimaryCtxRetain");
}
EXPORTED int cuCtxGetCurrent(void** out) {
  *out = context;
  return fake::called("cuCtxGetCurrent");
}
EXPORTED int cuCtxSetCurrent(void* c) {
  context = c;
  return fake::called("cuCtxSetCurrent");
}
EXPORTED int cuMemAlloc_v2(unsigned long long* at, size_t) {
  static unsigned long long next = 1 << 20;
  *at = next += 1 << 20;
  return fake::called("cuMemAlloc_v2");
}
EXPORTED int cuModuleLoadDataEx(void**, const void*, unsigned, int*, void**) {
  const int code = fake::called("cuModuleLoadDataEx");
  return refused ? 1 : code;
}
EXPORTED int cuModuleGetFunction(void** function, void*, const char*) {
  *function = &grid;
  return fake::called("cuModuleGetFunction");
}
EXPORTED int cuStreamIsCapturing(void*, int* out) {
  *out = capturing;
  return fake::called("cuStreamIsCapturing");
}
EXPORTED int cuLaunchKernel(void*, unsigned x, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, void*, void** arguments, void**) {
  grid = x;
  const auto* from = static_cast<const uint64_t*>(arguments[0]);
  for (int64_t i = 0; i < n_words; ++i) words[i] = from[i];
  return fake::called("cuLaunchKernel");
}

// ---- XLA's side ----

namespace {

XLA_FFI_Error* make_error(XLA_FFI_Error_Create_Args* a) { return new XLA_FFI_Error{a->message}; }
void destroy(XLA_FFI_Error_Destroy_Args* a) { delete a->error; }
XLA_FFI_Error* stream_of(XLA_FFI_Stream_Get_Args* a) {
  a->stream = &grid;
  return nullptr;
}
int ordinal = 0;
XLA_FFI_Error* ordinal_of(XLA_FFI_DeviceOrdinal_Get_Args* a) {
  a->device_ordinal = ordinal;
  return nullptr;
}

XLA_FFI_Api make_api() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = make_error;
  api.XLA_FFI_Error_Destroy = destroy;
  api.XLA_FFI_Stream_Get = stream_of;
  api.XLA_FFI_DeviceOrdinal_Get = ordinal_of;
  return api;
}
const XLA_FFI_Api& api() {
  static const XLA_FFI_Api a = make_api();
  return a;
}

}  // namespace

// A call as XLA keeps it: operands and results that it describes once, attributes that it copied.
// Leaked.
struct Call {
  std::vector<std::vector<int64_t>> dims;
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
  std::vector<XLA_FFI_ArgType> arg_types;
  std::vector<XLA_FFI_RetType> ret_types;
  std::vector<std::string> names, values;
  std::vector<XLA_FFI_ByteSpan> name_spans, strings;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<XLA_FFI_AttrType> attr_types;
  std::vector<XLA_FFI_Array> arrays;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<void*> attrs;
  size_t n_operands = 0;
};

EXPORTED Call* new_call() { return new Call; }

// An operand, or (once there was one) a result.
EXPORTED void add_buffer(Call* c, int result, int dtype, int rank, const int64_t* dims,
                         uint64_t data) {
  c->dims.emplace_back(dims, dims + rank);
  c->buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(dtype),
                        reinterpret_cast<void*>(data), rank, nullptr});
  if (!result) ++c->n_operands;
}

// kind: XLA_FFI_AttrType. Attributes come sorted by name, as XLA passes them.
EXPORTED void add_attribute(Call* c, const char* name, int kind, const char* bytes, int64_t size) {
  c->names.emplace_back(name);
  c->values.emplace_back(bytes, size);
  c->attr_types.push_back(static_cast<XLA_FFI_AttrType>(kind));
}

EXPORTED void finish(Call* c) {
  const size_t n = c->buffers.size(), m = c->names.size();
  for (size_t i = 0; i < n; ++i) {
    c->buffers[i].dims = c->dims[i].data();
    c->pointers.push_back(&c->buffers[i]);
  }
  c->arg_types.assign(c->n_operands, XLA_FFI_ArgType_BUFFER);
  c->ret_types.assign(n - c->n_operands, XLA_FFI_RetType_BUFFER);
  c->strings.resize(m);
  c->arrays.resize(m);
  c->scalars.resize(m);
  c->name_spans.resize(m);
  for (size_t i = 0; i < m; ++i) {
    std::string& v = c->values[i];
    c->name_spans[i] = {c->names[i].data(), c->names[i].size()};
    c->name_pointers.push_back(&c->name_spans[i]);
    c->strings[i] = {v.data(), v.size()};
    c->arrays[i] = {XLA_FFI_DataType_S64, v.size() / 8, v.data()};
    c->scalars[i] = {XLA_FFI_DataType_S64, v.data()};
    const bool array = c->attr_types[i] == XLA_FFI_AttrType_ARRAY;
    const bool scalar = c->attr_types[i] == XLA_FFI_AttrType_SCALAR;
    c->attrs.push_back(array    ? static_cast<void*>(&c->arrays[i])
                       : scalar ? static_cast<void*>(&c->scalars[i])
                                : &c->strings[i]);
  }
}

EXPORTED void set_address(Call* c, int64_t buffer, uint64_t data) {
  c->buffers[buffer].data = reinterpret_cast<void*>(data);
}
EXPORTED void set_dim(Call* c, int64_t buffer, int64_t axis, int64_t size) {
  c->dims[buffer][axis] = size;
}
// Other bytes at the address of an attribute's old ones, as many.
EXPORTED void set_bytes(Call* c, const char* name, const char* bytes, int64_t size) {
  for (size_t i = 0; i < c->names.size(); ++i) {
    if (c->names[i] == name && c->values[i].size() == static_cast<size_t>(size)) {
      std::memcpy(c->values[i].data(), bytes, size);
    }
  }
}
EXPORTED void set_device(int device, int in_context) {
  ordinal = device;
  context = in_context ? reinterpret_cast<void*>(static_cast<intptr_t>(device + 1)) : nullptr;
}
EXPORTED void refuse_modules(int on) { refused = on != 0; }
EXPORTED void set_capturing(int on) { capturing = on; }

// Runs a handler `times` times. Returns what it says went wrong ("" if nothing), for as long as
// nothing else runs.
EXPORTED const char* run(void* handler, int stage, Call* c, int64_t times, int64_t keep, double* ns,
                         int64_t* allocated) {
  static std::string message;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api();
  frame.stage = static_cast<XLA_FFI_ExecutionStage>(stage);
  const auto n = static_cast<int64_t>(c->n_operands), all = static_cast<int64_t>(c->buffers.size());
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, n, c->arg_types.data(), c->pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, all - n, c->ret_types.data(),
                c->pointers.data() + n};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(c->attrs.size()),
                 c->attr_types.data(),
                 c->name_pointers.data(),
                 c->attrs.data()};
  message.clear();
  words.assign(keep, 0);
  n_words = keep;
  counting = times == 1;
  const int64_t before = allocations;
  const auto begun = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < times; ++i) {
    frame.future = nullptr;
    if (XLA_FFI_Error* why = reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame)) {
      message = why->message;
      delete why;
      break;
    }
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begun;
  counting = false;
  *allocated = allocations - before;
  *ns = took.count() / static_cast<double>(times);
  return message.c_str();
}

EXPORTED int64_t count_of(const char* symbol) {
  const auto it = counts().find(symbol);
  return it == counts().end() ? 0 : it->second;
}
EXPORTED int64_t count_all() {
  int64_t n = 0;
  for (const auto& [name, count] : counts()) n += count;
  return n;
}
EXPORTED const char* calls_in_order() { return order.c_str(); }
EXPORTED void forget_counts() {
  counts().clear();
  order.clear();
}
EXPORTED unsigned last_grid() { return grid; }
EXPORTED uint64_t last_word(int64_t i) { return words[i]; }
