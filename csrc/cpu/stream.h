// Copies that write past the caches: memory is not read before it is overwritten whole, which halves the traffic of a
// large write. For what will not be read again before it would have left the cache anyway.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define PAGED_KV_STREAMS 1
#endif

namespace paged_kv::cpu {

inline constexpr int64_t kCacheLine = 64;
inline constexpr int64_t kStreamBytes = 1 << 20;  // a call that writes less leaves its bytes in the caches

// Only whole cache lines are worth it.
inline bool can_stream(const void* destination, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(destination) | uint64_t(bytes)) % kCacheLine == 0;
}

#ifdef PAGED_KV_STREAMS
// can_stream(destination, bytes) must hold.
inline void stream_copy(void* destination, const void* source, int64_t bytes) {
  __m128i* to = static_cast<__m128i*>(destination);
  const __m128i* from = static_cast<const __m128i*>(source);
  for (const __m128i* end = from + bytes / 16; from != end; from += 4, to += 4) {
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

// Makes a thread's streamed writes visible to others before its next ones.
inline void stream_fence() { _mm_sfence(); }
#else
inline void stream_copy(void* destination, const void* source, int64_t bytes) {
  std::memcpy(destination, source, size_t(bytes));
}

inline void stream_fence() {}
#endif

}  // namespace paged_kv::cpu
