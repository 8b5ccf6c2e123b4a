// Large arrays whose pages the system commits when they are first written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <random>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace ngram {

// `size` zeroed values of a trivial type, aligned to cache lines. Huge pages, where the system grants them: a trie of a
// million nodes spans more small pages than a TLB holds, and every lookup would pay for a page walk.
template <class T>
class Array {
 public:
  explicit Array(size_t size) : bytes_(size * sizeof(T)), raw_(std::calloc(bytes_ + ALIGNMENT, 1)) {
    if (raw_ == nullptr) throw std::bad_alloc();
    const uintptr_t start = (reinterpret_cast<uintptr_t>(raw_) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    data_ = reinterpret_cast<T*>(start);
    advise(start);
  }
  Array(Array&& other) noexcept
      : bytes_(other.bytes_), raw_(std::exchange(other.raw_, nullptr)), data_(std::exchange(other.data_, nullptr)) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(raw_, other.raw_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Array() { std::free(raw_); }

  T& operator[](size_t index) { return data_[index]; }
  const T& operator[](size_t index) const { return data_[index]; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t ALIGNMENT = 64;
  static constexpr size_t HUGE_PAGE = size_t{1} << 21;

  void advise([[maybe_unused]] uintptr_t start) const {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t first = (start + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (first + HUGE_PAGE <= start + bytes_) {
      madvise(reinterpret_cast<void*>(first), (start + bytes_ - first) / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);
    }
#endif
  }

  size_t bytes_;
  void* raw_;
  T* data_;
};

// Seeds every hash, so that clients cannot choose tokens that collide.
inline const uint64_t HASH_SECRET = [] {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}();

// The largest power of two that is at most `value`, which is positive.
inline uint32_t power_of_two_within(uint32_t value) {
  uint32_t power = 1;
  while (power <= value / 2) power *= 2;
  return power;
}

inline void prefetch(const void* address) {
  __builtin_prefetch(address);
  asm volatile("");  // gcc takes a function that only prefetches for one without effect and drops its calls
}

}  // namespace ngram
