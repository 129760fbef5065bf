// 64-bit fingerprints of strings, equal to TensorFlow's Fingerprint64 (FarmHash).

#ifndef RECOM_JAX_CSRC_FINGERPRINT_H_
#define RECOM_JAX_CSRC_FINGERPRINT_H_

#include <cstddef>
#include <cstdint>

namespace recom {

uint64_t fingerprint64(const char* s, size_t n);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_FINGERPRINT_H_
