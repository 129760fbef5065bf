// 64-bit fingerprints of strings, equal to TensorFlow's Fingerprint64 (FarmHash).

#ifndef RECOM_JAX_CSRC_FINGERPRINT_H_
#define RECOM_JAX_CSRC_FINGERPRINT_H_

#include <cstddef>
#include <cstdint>

namespace recom {

uint64_t fingerprint64(const char* s, size_t n);

// out[i] = fingerprint of data[offsets[i], offsets[i + 1]), on up to `threads` threads (0: as many
// as pay).
void fingerprints(const char* data, const int64_t* offsets, int64_t n, int threads, uint64_t* out);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_FINGERPRINT_H_
