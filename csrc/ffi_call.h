// What the handlers share. Only they include this: ffi.h is slow to compile.

#ifndef RECOM_JAX_CSRC_FFI_CALL_H_
#define RECOM_JAX_CSRC_FFI_CALL_H_

#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <vector>

#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace recom {

namespace ffi = xla::ffi;

inline Buffer as_buffer(const ffi::AnyBuffer& b) {
  const auto dims = b.dimensions();
  return {b.untyped_data(), dims.begin(), static_cast<int>(dims.size()),
          static_cast<int>(b.element_type())};
}

// The call's operands and results. Returns the error of one that XLA cannot describe.
inline std::optional<ffi::Error> read_buffers(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                              std::vector<Buffer>* operands,
                                              std::vector<Buffer>* results) {
  operands->reserve(args.size());
  results->reserve(rets.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto a = args.get<ffi::AnyBuffer>(i);
    if (!a.has_value()) return a.error();
    operands->push_back(as_buffer(*a));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto r = rets.get<ffi::AnyBuffer>(i);
    if (!r.has_value()) return r.error();
    results->push_back(as_buffer(**r));
  }
  return std::nullopt;
}

// Runs `body`, turning exceptions into XLA's errors.
template <typename Body>
ffi::Error guarded(Body body) {
  try {
    return body();
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(e.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "recom call: out of memory");
  } catch (const std::exception& e) {
    return ffi::Error::Internal(e.what());
  }
}

}  // namespace recom

#endif  // RECOM_JAX_CSRC_FFI_CALL_H_
