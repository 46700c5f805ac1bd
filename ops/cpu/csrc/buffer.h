// Growing scratch memory, aligned to cache lines.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace loom {

class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // At least `bytes` bytes of undefined content; earlier pointers become invalid when it grows.
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      free(data_);
      size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      data_ = (char*)aligned_alloc(4096, size_t(size_));
      if (!data_) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// Cuts one buffer into aligned pieces: lay everything out once without memory to learn the size,
// then again with it.
class Arena {
 public:
  explicit Arena(char* start = nullptr) : start_(start) {}

  template <class T>
  T* take(int64_t count) {
    int64_t at = used_;
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return start_ ? (T*)(start_ + at) : nullptr;
  }
  int64_t used() const { return used_; }

 private:
  char* start_;
  int64_t used_ = 0;
};

}  // namespace loom
