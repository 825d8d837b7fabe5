// Memory for what a step computes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace anyrig {

// Memory that is kept from step to step and only ever grows.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  uint8_t* fit(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      data_ = static_cast<uint8_t*>(std::aligned_alloc(4096, size_));
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
      std::memset(data_, 0, size_);
    }
    return data_;
  }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace anyrig
