// The machine's own limits, measured with the kernels that are judged by them.
#pragma once

#include <chrono>

#include "linear.h"
#include "pool.h"

namespace anyrig {

// Seconds of the quickest of `repeats` runs of work(thread) on all threads.
template <class Work>
double quickest(Pool& pool, int repeats, Work&& work) {
  using clock = std::chrono::steady_clock;
  double best = 1e30;
  const std::function<void(int)> job = work;
  for (int i = 0; i < repeats; ++i) {
    const auto start = clock::now();
    pool.run(job);
    best = std::min(best, std::chrono::duration<double>(clock::now() - start).count());
  }
  return best;
}

// Bytes per second of reading `bytes`, each thread its own part.
inline double measure_read(Pool& pool, size_t bytes) {
  std::vector<uint8_t> memory(bytes, 1);
  std::vector<i32x16> sums(pool.size() * 4);
  const double seconds = quickest(pool, 5, [&](int thread) {
    const size_t share = bytes / pool.active() / 256 * 256;
    const uint8_t* p = memory.data() + share * thread;
    i32x16 a{}, b{}, c{}, d{};
    for (size_t i = 0; i < share; i += 256) {
      a ^= load<i32x16>(p + i), b ^= load<i32x16>(p + i + 64);
      c ^= load<i32x16>(p + i + 128), d ^= load<i32x16>(p + i + 192);
    }
    sums[thread * 4] = a ^ b ^ c ^ d;
  });
  return double(bytes) / seconds;
}

// Operations (two per multiply-add) per second of an [m, k] x [k, n] product.
inline double measure_product(Pool& pool, Kind kind, int m, int n, int k) {
  Linear w;
  w.kind = kind, w.n = n, w.k = k, w.group = 32, w.minimum = true;
  std::vector<uint8_t> packed(w.bytes() + 64), memory(Rows::bytes(kind, m, w.padded_k()) + 64);
  std::vector<float> row(k), block(size_t(k) * LANES);
  for (size_t i = 0; i < block.size(); ++i) block[i] = float(int(i * 7919 % 255) - 127) / 127;
  auto aligned = [](std::vector<uint8_t>& v) {
    return v.data() + (64 - reinterpret_cast<uintptr_t>(v.data()) % 64) % 64;
  };
  for (int b = 0; b < w.blocks(); ++b) pack_block(w, block.data(), k, LANES, aligned(packed) + w.block_bytes() * b);
  w.data = aligned(packed);
  const Rows rows = Rows::at(aligned(memory), w, m);
  for (int r = 0; r < m; ++r) rows.put(r, 0, k, block.data() + size_t(r % LANES) * k);
  std::vector<Unpacked> scratch(pool.size());
  for (auto& unpacked : scratch) unpacked.fit(w);
  std::vector<float> sums(pool.size() * LANES);
  Tickets tickets;
  const int unit = std::max(6, w.blocks() / (pool.size() * 8) / 6 * 6);
  double best = 1e30;
  for (int repeat = 0; repeat < 5; ++repeat) {
    tickets.reset();
    best = std::min(best, quickest(pool, 1, [&](int thread) {
      for (int first; (first = tickets.take() * unit) < w.blocks();)
        product(w, rows, m, first, std::min(w.blocks(), first + unit), false, nullptr, scratch[thread],
                [&](int, int, int, int, const float* tile) { sums[thread * LANES] += tile[0]; });
    }));
  }
  return 2.0 * m * n * k / best;
}

}  // namespace anyrig
