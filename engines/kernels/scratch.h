// Room for what a call computes, which a thread keeps for its next one.

#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "vectors.h"

// Memory in pages of 2 MB, where the system has some: a prompt's rows lie far apart, and each page is looked up anew.
template <class T>
struct InLargePages {
  typedef T value_type;
  static constexpr size_t kPage = 2 << 20;

  InLargePages() = default;
  template <class U>
  InLargePages(const InLargePages<U>&) {}
  T* allocate(size_t n) {
    const size_t bytes = n * sizeof(T), whole = bytes / kPage * kPage;
    void* const at = whole ? std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage) : std::malloc(bytes);
    if (!at) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (whole) madvise(at, whole, MADV_HUGEPAGE);  // beyond them a large page would be more than was asked for
#endif
    return (T*)at;
  }
  void deallocate(T* at, size_t) { std::free(at); }
  bool operator==(const InLargePages&) const { return true; }
  bool operator!=(const InLargePages&) const { return false; }
};
typedef std::vector<float, InLargePages<float>> Buffer;  // what a thread keeps from one call to the next

// Room for n floats, from the beginning of a line on: a register read across two lines takes two reads.
inline float* scratch(Buffer& buffer, int64_t n) {
  constexpr int64_t kFloats = kLine / sizeof(float);
  if ((int64_t)buffer.size() < n + kFloats) buffer.resize(n + kFloats);
  const auto at = reinterpret_cast<uintptr_t>(buffer.data());
  return buffer.data() + (kLine - at % kLine) % kLine / sizeof(float);
}
