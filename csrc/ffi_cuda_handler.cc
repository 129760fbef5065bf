// The handlers of CUDA, and of staging.

#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_module.h"
#include "cuda_stage.h"
#include "ffi_call.h"
#include "ffi_handler.h"

namespace recom {
namespace {

// Where `pointers` is 0, the last result is the table.
void set_table_apart(CudaArguments* a) {
  a->table = {};
  if (a->pointers == 0 && !a->results.empty()) {
    a->table = a->results.back();
    a->results.pop_back();
  }
}

ffi::Error initialize(const CudaArguments& a, cuda::Stream) {
  prepare_call(a);
  return ffi::Error::Success();
}

ffi::Error execute(const CudaArguments& a, cuda::Stream stream) {
  const PreparedCall* call = find_prepared(a);
  if (!call) {
    int capturing = 0;
    const cuda::Driver& driver = cuda::Driver::get();
    driver.check(driver.stream_capturing(stream, &capturing), "tell a stream's state");
    if (capturing) {
      return ffi::Error::Internal("recom call: captured in a graph before it was initialized");
    }
    call = &prepare_call(a);
    ++cuda_stats().late_preparations;
  }
  launch_call(*call, a, stream);
  return ffi::Error::Success();
}

// Outside graphs, for calls that read a slot's buffer: it is another one at most calls, and a graph
// would be captured again each time. The kernel runs while XLA still launches what comes after it.
// `key` is a digest of launch and layout.
ffi::Error execute_alone(const CudaArguments& a, cuda::Stream stream) {
  launch_call(prepare_call(a), a, stream);
  return ffi::Error::Success();
}

// ---- as ffi.h binds them ----

template <typename Body>
ffi::Error call(Body body, cuda::Stream stream, CudaArguments a, ffi::RemainingArgs args,
                ffi::RemainingRets rets) {
  return guarded([&]() -> ffi::Error {
    if (auto error = read_buffers(args, rets, &a.operands, &a.results)) return *error;
    set_table_apart(&a);
    return body(a, stream);
  });
}

CudaArguments arguments(std::string_view program, std::string_view hash, std::string_view launch,
                        std::string_view ptx, std::string_view digest,
                        ffi::Span<const int64_t> layout, int64_t pointers, int32_t device) {
  return {
      program,  hash, launch, ptx,   digest, layout.begin(), static_cast<int64_t>(layout.size()),
      pointers, {},   {},     device};
}

ffi::Error bound_initialize(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            std::string_view program, std::string_view hash,
                            std::string_view launch, std::string_view ptx, std::string_view digest,
                            ffi::Span<const int64_t> layout, int64_t pointers) {
  return call(initialize, nullptr,
              arguments(program, hash, launch, ptx, digest, layout, pointers, device), args, rets);
}

ffi::Error bound_execute(cuda::Stream stream, int32_t device, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, std::string_view program, std::string_view hash,
                         std::string_view launch, std::string_view ptx, std::string_view digest,
                         ffi::Span<const int64_t> layout, int64_t pointers) {
  return call(execute, stream,
              arguments(program, hash, launch, ptx, digest, layout, pointers, device), args, rets);
}

ffi::Error bound_alone(cuda::Stream stream, int32_t device, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, std::string_view program, std::string_view hash,
                       std::string_view launch, std::string_view ptx, std::string_view digest,
                       ffi::Span<const int64_t> layout, int64_t pointers, std::string_view key) {
  CudaArguments a = arguments(program, hash, launch, ptx, digest, layout, pointers, device);
  a.key = key;
  return call(execute_alone, stream, std::move(a), args, rets);
}

// Attributes of all.
template <typename Binding>
auto cuda_attributes(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("program")
      .template Attr<std::string_view>("hash")
      .template Attr<std::string_view>("launch")
      .template Attr<std::string_view>("ptx")
      .template Attr<std::string_view>("digest")
      .template Attr<ffi::Span<const int64_t>>("layout")
      .template Attr<int64_t>("pointers");
}
XLA_FFI_DEFINE_HANDLER(kInitialize, bound_initialize,
                       cuda_attributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER(kExecute, bound_execute,
                       cuda_attributes(ffi::Ffi::Bind()
                                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                           .Ctx<ffi::DeviceOrdinal>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAlone, bound_alone,
                       cuda_attributes(ffi::Ffi::Bind()
                                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                           .Ctx<ffi::DeviceOrdinal>())
                           .Attr<std::string_view>("key"));

// ---- the same read by hand ----
//
// XLA calls handlers at every execution, `initialize` too. What ffi.h makes of each buffer takes 20
// ns, and vectors of them are allocated: most of what a call of a thousand columns takes before it
// is launched. So frames, whose form is XLA's stable C interface, are read here, into memory that
// the thread keeps; one that is not as expected goes the way above, which says what is wrong.

class AttributeReader {
 public:
  explicit AttributeReader(const XLA_FFI_Attrs& attrs) : attrs_(attrs) {}
  // The next attribute, in the order of names, which is XLA's.
  bool read(std::string_view name, std::string_view* out) {
    const void* at = next(name, XLA_FFI_AttrType_STRING);
    if (!at) return false;
    const auto* span = static_cast<const XLA_FFI_ByteSpan*>(at);
    *out = {span->ptr, span->len};
    return true;
  }
  bool read(std::string_view name, const int64_t** data, int64_t* size) {
    const auto* array = static_cast<const XLA_FFI_Array*>(next(name, XLA_FFI_AttrType_ARRAY));
    if (!array || array->dtype != XLA_FFI_DataType_S64) return false;
    *data = static_cast<const int64_t*>(array->data);
    *size = static_cast<int64_t>(array->size);
    return true;
  }
  bool read(std::string_view name, int64_t* out) {
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(next(name, XLA_FFI_AttrType_SCALAR));
    if (!scalar || scalar->dtype != XLA_FFI_DataType_S64) return false;
    *out = *static_cast<const int64_t*>(scalar->value);
    return true;
  }
  bool done() const { return at_ == attrs_.size; }

 private:
  const void* next(std::string_view name, XLA_FFI_AttrType type) {
    if (at_ == attrs_.size || attrs_.types[at_] != type) return nullptr;
    const XLA_FFI_ByteSpan& is = *attrs_.names[at_];
    return std::string_view(is.ptr, is.len) == name ? attrs_.attrs[at_++] : nullptr;
  }
  const XLA_FFI_Attrs& attrs_;
  int64_t at_ = 0;
};

bool read_attributes(const XLA_FFI_Attrs& attrs, bool alone, CudaArguments* a) {
  AttributeReader r(attrs);
  a->key = {};
  return r.read("digest", &a->digest) && r.read("hash", &a->hash) &&
         (!alone || r.read("key", &a->key)) && r.read("launch", &a->launch) &&
         r.read("layout", &a->layout, &a->n_layout) && r.read("pointers", &a->pointers) &&
         r.read("program", &a->program) && r.read("ptx", &a->ptx) && r.done();
}

template <typename Type>
bool read_buffers(int64_t n, const Type* types, void* const* from, Type wanted,
                  std::vector<Buffer>* to) {
  to->clear();
  for (int64_t i = 0; i < n; ++i) {
    if (types[i] != wanted) return false;
    const auto* b = static_cast<const XLA_FFI_Buffer*>(from[i]);
    to->push_back({b->data, b->dims, static_cast<int>(b->rank), static_cast<int>(b->dtype)});
  }
  return true;
}

bool read_frame(const XLA_FFI_CallFrame& frame, bool on_stream, CudaArguments* a,
                cuda::Stream* stream) {
  if (!read_buffers(frame.args.size, frame.args.types, frame.args.args, XLA_FFI_ArgType_BUFFER,
                    &a->operands) ||
      !read_buffers(frame.rets.size, frame.rets.types, frame.rets.rets, XLA_FFI_RetType_BUFFER,
                    &a->results)) {
    return false;
  }
  set_table_apart(a);
  const auto asked = [&](XLA_FFI_Error* error) {
    if (error) ffi::internal::DestroyError(frame.api, error);
    return error == nullptr;
  };
  XLA_FFI_DeviceOrdinal_Get_Args device{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                        frame.ctx, 0};
  if (!asked(frame.api->XLA_FFI_DeviceOrdinal_Get(&device))) return false;
  a->device = device.device_ordinal;
  if (!on_stream) return true;
  XLA_FFI_Stream_Get_Args where{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  if (!asked(frame.api->XLA_FFI_Stream_Get(&where))) return false;
  *stream = static_cast<cuda::Stream>(where.stream);
  return true;
}

template <ffi::ExecutionStage stage, typename Body>
XLA_FFI_Error* enter(XLA_FFI_CallFrame* frame, XLA_FFI_Handler* bound, bool alone, Body body) {
  static thread_local CudaArguments a;
  cuda::Stream stream = nullptr;
  constexpr bool kOnStream = stage == ffi::ExecutionStage::kExecute;
  if (frame->struct_size < XLA_FFI_CallFrame_STRUCT_SIZE || frame->extension_start != nullptr ||
      frame->stage != static_cast<XLA_FFI_ExecutionStage>(stage) ||
      !read_attributes(frame->attrs, alone, &a) || !read_frame(*frame, kOnStream, &a, &stream)) {
    return bound(frame);
  }
  ffi::Error error = guarded([&] { return body(a, stream); });
  if (error.success()) return nullptr;
  return ffi::ResultEncoding<stage, ffi::Error>::Encode(frame->api, frame->ctx, std::move(error));
}

XLA_FFI_Error* enter_initialize(XLA_FFI_CallFrame* frame) {
  return enter<ffi::ExecutionStage::kInitialize>(frame, kInitialize, false, initialize);
}
XLA_FFI_Error* enter_execute(XLA_FFI_CallFrame* frame) {
  return enter<ffi::ExecutionStage::kExecute>(frame, kExecute, false, execute);
}
XLA_FFI_Error* enter_alone(XLA_FFI_CallFrame* frame) {
  return enter<ffi::ExecutionStage::kExecute>(frame, kAlone, true, execute_alone);
}

// ---- staging ----

// Results: a part of the slot, if one is wanted, and `done`. The latter is not written on a GPU: it
// says that the call has ended, and is never read.
StageWish wish_of(ffi::AnyBuffer token, ffi::RemainingRets rets, int64_t nbytes, int64_t begin,
                  int64_t whole) {
  StageWish wish{static_cast<char*>(token.untyped_data()), whole != 0, nullptr, begin, 0};
  if (rets.size() > 1) {
    auto part = rets.get<ffi::AnyBuffer>(0);
    if (!part.has_value()) throw std::invalid_argument("recom stage: no part");
    wish.part = (*part)->untyped_data();
    wish.nbytes = static_cast<int64_t>((*part)->size_bytes());
  }
  const bool holds = whole == 0 || static_cast<int64_t>(token.size_bytes()) == nbytes;
  if (!holds || begin < 0 || begin > nbytes || wish.nbytes > nbytes - begin)
    throw std::invalid_argument("recom stage: a part outside its slot");
  return wish;
}

ffi::Error stage_on_host(ffi::AnyBuffer token, ffi::RemainingRets rets, int64_t nbytes,
                         int64_t begin, int64_t whole) {
  return guarded([&]() -> ffi::Error {
    stage_copy_on_host(wish_of(token, rets, nbytes, begin, whole),
                       stage_source(token.untyped_data(), nbytes));
    auto done = rets.get<ffi::AnyBuffer>(rets.size() - 1);
    if (done.has_value()) *static_cast<uint8_t*>((*done)->untyped_data()) = 0;
    return ffi::Error::Success();
  });
}

ffi::Error stage_on_cuda(cuda::Stream stream, int32_t device, ffi::AnyBuffer token,
                         ffi::RemainingRets rets, int64_t nbytes, int64_t begin, int64_t whole) {
  return guarded([&]() -> ffi::Error {
    stage_copy(wish_of(token, rets, nbytes, begin, whole),
               stage_source(token.untyped_data(), nbytes), device, stream);
    return ffi::Error::Success();
  });
}

template <typename Binding>
auto stage_call(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .RemainingRets()
      .template Attr<int64_t>("nbytes")
      .template Attr<int64_t>("begin")
      .template Attr<int64_t>("whole");
}
XLA_FFI_DEFINE_HANDLER(kStageOnHost, stage_on_host, stage_call(ffi::Ffi::Bind()));
// Not compatible with command buffers: a graph would keep the host address that it was captured
// with, and XLA captures it anew only when a *device* address changes. Calls take turns with slots,
// so it would be captured again at most calls; one copy ahead of the graph costs less.
XLA_FFI_DEFINE_HANDLER(kStageOnCuda, stage_on_cuda,
                       stage_call(ffi::Ffi::Bind()
                                      .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                      .Ctx<ffi::DeviceOrdinal>()));

}  // namespace

void* cuda_initialize_handler() { return reinterpret_cast<void*>(enter_initialize); }
void* cuda_execute_handler() { return reinterpret_cast<void*>(enter_execute); }
void* cuda_alone_handler() { return reinterpret_cast<void*>(enter_alone); }
void* stage_on_host_handler() { return reinterpret_cast<void*>(kStageOnHost); }
void* stage_on_cuda_handler() { return reinterpret_cast<void*>(kStageOnCuda); }

}  // namespace recom
