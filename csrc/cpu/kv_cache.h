// The decoder's own pages: anonymous memory that the system hands out as it is written.
//
//   page 0 | page 1 | ...        each: layer 0 | layer 1 | ...        each: head 0 keys, values | head 1 keys, values | ...
//
// A page of all layers is one stretch, so that a short sequence touches little memory and huge pages hold whole ones.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <system_error>
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

  static size_t head_bytes(const AttentionLayer& a, int page_size, bool half) {
    return size_t(page_size) * (a.dim + a.v_dim) * (half ? 2 : 4);
  }

  // Pages of every layer. `pinned`: all memory is taken now rather than when it is first written.
  std::vector<Pages> allocate(const std::vector<AttentionLayer>& layers, int num_pages, int page_size, bool half,
                              bool pinned) {
    size_t page_bytes = 0;
    for (auto& a : layers) page_bytes += head_bytes(a, page_size, half) * a.kv_heads;
    // An odd number of lines: pages that lie a power of two apart would share a few sets of the caches. All sequences
    // of a batch write at about the same place of a page; with 128 of them that alone took a tenth of a step.
    page_bytes = (ceil_div(int(page_bytes), 64) | 1) * size_t(64) + 66 * 64;
    if (base_) munmap(base_, size_);
    base_ = nullptr;
    size_ = page_bytes * num_pages;
    num_pages_ = num_pages, page_bytes_ = page_bytes;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (pinned ? MAP_POPULATE : 0);
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the KV cache");
    base_ = static_cast<uint8_t*>(memory);
    madvise(base_, size_, MADV_HUGEPAGE);
    std::vector<Pages> pages;
    size_t at = 0;
    for (auto& a : layers) {
      const size_t head = head_bytes(a, page_size, half);
      uint8_t* k = base_ + at;
      uint8_t* v = k + size_t(page_size) * a.dim * (half ? 2 : 4);
      pages.push_back({k, v, page_bytes, head, page_bytes, head, page_size, half});
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
  uint8_t* base_ = nullptr;
  size_t size_ = 0, page_bytes_ = 0;
  int num_pages_ = 0;
};

}  // namespace anyrig
