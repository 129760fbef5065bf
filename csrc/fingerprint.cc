// FarmHash's Fingerprint64, written from its definition: short strings by their ends, long ones in
// blocks of 64 bytes with 56 bytes of state. Numbers are read little-endian, as the definition
// asks.

#include "fingerprint.h"

#include <cstring>
#include <utility>

namespace recom {
namespace {

constexpr uint64_t kA = 0xc3a5c85c97cb3127, kB = 0xb492b66fbe98f273, kC = 0x9ae16a3b2f90404f;

template <class T>
uint64_t read(const char* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  v = sizeof(T) == 8 ? __builtin_bswap64(v) : __builtin_bswap32(static_cast<uint32_t>(v));
#endif
  return v;
}
uint64_t r64(const char* p) { return read<uint64_t>(p); }
uint64_t r32(const char* p) { return read<uint32_t>(p); }
uint64_t rotr(uint64_t v, int by) { return by == 0 ? v : v >> by | v << (64 - by); }
uint64_t fold(uint64_t v) { return v ^ v >> 47; }

// Two words to one.
uint64_t join(uint64_t u, uint64_t v, uint64_t mul) {
  const uint64_t a = fold((u ^ v) * mul);
  return fold((v ^ a) * mul) * mul;
}

uint64_t upto16(const char* s, size_t n) {
  const uint64_t mul = kC + n * 2;
  if (n >= 8) {
    const uint64_t a = r64(s) + kC, b = r64(s + n - 8);
    return join(rotr(b, 37) * mul + a, (rotr(a, 25) + b) * mul, mul);
  }
  if (n >= 4) return join(n + (r32(s) << 3), r32(s + n - 4), mul);
  if (n == 0) return kC;
  const auto byte = [s](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(s[i])); };
  const uint32_t y = byte(0) + (byte(n / 2) << 8);
  const uint32_t z = static_cast<uint32_t>(n) + (byte(n - 1) << 2);
  return fold(y * kC ^ z * kA) * kC;
}

uint64_t upto32(const char* s, size_t n) {
  const uint64_t mul = kC + n * 2;
  const uint64_t a = r64(s) * kB, b = r64(s + 8);
  const uint64_t c = r64(s + n - 8) * mul, d = r64(s + n - 16) * kC;
  return join(rotr(a + b, 43) + rotr(c, 30) + d, a + rotr(b + kC, 18) + c, mul);
}

uint64_t upto64(const char* s, size_t n) {
  const uint64_t mul = kC + n * 2;
  const uint64_t a = r64(s) * kC, b = r64(s + 8);
  const uint64_t c = r64(s + n - 8) * mul, d = r64(s + n - 16) * kC;
  const uint64_t y = rotr(a + b, 43) + rotr(c, 30) + d;
  const uint64_t z = join(y, a + rotr(b + kC, 18) + c, mul);
  const uint64_t e = r64(s + 16) * mul, f = r64(s + 24);
  const uint64_t g = (y + r64(s + n - 32)) * mul, h = (z + r64(s + n - 24)) * mul;
  return join(rotr(e + f, 43) + rotr(g, 30) + h, e + rotr(f + a, 18) + g, mul);
}

using Pair = std::pair<uint64_t, uint64_t>;

// 32 bytes and two words of state to two words.
Pair weak(const char* s, uint64_t a, uint64_t b) {
  const uint64_t w = r64(s), x = r64(s + 8), y = r64(s + 16), z = r64(s + 24);
  a += w;
  b = rotr(b + a + z, 21);
  const uint64_t before = a;
  a += x + y;
  b += rotr(a, 44);
  return {a + z, b + before};
}

uint64_t longer(const char* s, size_t n) {
  const uint64_t seed = 81;
  uint64_t x = seed, y = seed * kB + 113, z = fold(y * kC + 113) * kC;
  Pair v{0, 0}, w{0, 0};
  x = x * kC + r64(s);
  const size_t whole = (n - 1) / 64 * 64;
  const char* const end = s + whole;
  const char* const last = s + n - 64;
  for (; s != end; s += 64) {
    x = rotr(x + y + v.first + r64(s + 8), 37) * kB;
    y = rotr(y + v.second + r64(s + 48), 42) * kB;
    x ^= w.second;
    y += v.first + r64(s + 40);
    z = rotr(z + w.first, 33) * kB;
    v = weak(s, v.second * kB, x + w.first);
    w = weak(s + 32, z + w.second, y + r64(s + 16));
    std::swap(z, x);
  }
  const uint64_t mul = kB + ((z & 0xff) << 1);
  s = last;
  w.first += (n - 1) & 63;
  v.first += w.first;
  w.first += v.first;
  x = rotr(x + y + v.first + r64(s + 8), 37) * mul;
  y = rotr(y + v.second + r64(s + 48), 42) * mul;
  x ^= w.second * 9;
  y += v.first * 9 + r64(s + 40);
  z = rotr(z + w.first, 33) * mul;
  v = weak(s, v.second * mul, x + w.first);
  w = weak(s + 32, z + w.second, y + r64(s + 16));
  std::swap(z, x);
  return join(join(v.first, w.first, mul) + fold(y) * kA + z, join(v.second, w.second, mul) + x,
              mul);
}

}  // namespace

uint64_t fingerprint64(const char* s, size_t n) {
  if (n <= 16) return upto16(s, n);
  if (n <= 32) return upto32(s, n);
  return n <= 64 ? upto64(s, n) : longer(s, n);
}

}  // namespace recom
