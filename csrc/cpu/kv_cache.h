// The decoder's own pages: anonymous memory that the system hands out as it is written.
//
//   page 0 | page 1 | ...        each: layer 0 | layer 1 | ...        each: head 0 keys, values | head 1 keys, values | ...
//
// A page of all layers is one stretch, so that a short sequence touches little memory and huge pages hold whole ones.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <vector>

#include "attention.h"

namespace anyrig {

class KvCache {
 public:
  KvCache() = default;
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;
  ~KvCache() {
    if (base_) munmap(base_, size_);
  }

  static size_t head_bytes(const AttentionLayer& a, int page_size, bool half, bool bytes) {
    return Pages::size(page_size, a.dim, half, bytes) + Pages::size(page_size, a.v_dim, half, bytes);
  }

  // All layers' keys and values of one page. An odd number of lines: pages a power of two apart would share a few sets
  // of the caches, and all sequences of a batch write at about the same place of a page.
  static size_t bytes_of_page(const std::vector<AttentionLayer>& layers, int page_size, bool half, bool int8) {
    size_t bytes = 0;
    for (auto& a : layers) bytes += head_bytes(a, page_size, half, int8) * a.kv_heads;
    return ((bytes + 63) / 64 | 1) * 64;
  }

  // Pages of every layer. `pinned`: all memory is taken now rather than when it is first written.
  std::vector<Pages> allocate(const std::vector<AttentionLayer>& layers, int num_pages, int page_size, bool half,
                              bool int8, bool pinned) {
    const size_t page_bytes = bytes_of_page(layers, page_size, half, int8);
    if (base_) munmap(base_, size_);
    base_ = nullptr;
    num_pages_ = 0;
    size_ = page_bytes * num_pages;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(memory);
    madvise(base_, size_, MADV_HUGEPAGE);
    if (pinned) pin();
    num_pages_ = num_pages, page_bytes_ = page_bytes;
    std::vector<Pages> pages;
    size_t at = 0;
    for (auto& a : layers) {
      const size_t head = head_bytes(a, page_size, half, int8);
      uint8_t* k = base_ + at;
      uint8_t* v = k + Pages::size(page_size, a.dim, half, int8);
      pages.push_back({k, v, page_bytes, head, page_bytes, head, page_size, half, int8});
      at += head * a.kv_heads;
    }
    return pages;
  }

  // Zeros a page in all layers: what it holds is not finite, and 0 * NaN is NaN.
  void scrub(int page) {
    if (page >= 0 && page < num_pages_) std::memset(base_ + size_t(page) * page_bytes_, 0, page_bytes_);
  }

  size_t bytes() const { return size_; }

 private:
  // Takes the memory now; one that is not there must be an error here, not the end of the process later.
  void pin() {
#if defined(MADV_POPULATE_WRITE)
    if (madvise(base_, size_, MADV_POPULATE_WRITE) == 0) return;
    if (errno == ENOMEM || errno == EFAULT) throw std::bad_alloc();
#endif
    for (size_t i = 0; i < size_; i += 4096) base_[i] = 0;  // an older kernel
  }

  uint8_t* base_ = nullptr;
  size_t size_ = 0, page_bytes_ = 0;
  int num_pages_ = 0;
};

}  // namespace anyrig
