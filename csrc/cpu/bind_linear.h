// Packing, and the product alone.
#pragma once

#include "arrays.h"
#include "buffer.h"
#include "linear.h"
#include "team.h"

namespace anyrig {

inline size_t packed_size(const std::string& kind, int n, int k, int group, bool minimum) {
  return shape_of(kind, n, k, group, minimum).bytes();
}

inline void pack(const std::string& kind, Matrix<const float> w, Vector<uint8_t> out, int row, int n, int group, bool minimum) {
  Linear shape = shape_of(kind, n, int(w.shape(1)), group, minimum);
  const int rows = int(w.shape(0));
  if (out.size() != shape.bytes()) refuse("`out` must have packed_size(...) bytes");
  if (row < 0 || row % LANES || row + rows > n || (rows % LANES && row + rows != n))
    refuse("rows are packed by sixteens, within the matrix");
  nb::gil_scoped_release release;
  for (int r = 0; r < rows; r += LANES)
    pack_block(shape, w.data() + size_t(r) * shape.k, shape.k, std::min(LANES, rows - r),
               out.data() + shape.block_bytes() * ((row + r) / LANES));
}

inline void unpack(const std::string& kind, Vector<const uint8_t> data, Matrix<float> out, int row, int n, int group,
            bool minimum) {
  const Linear w = packed_of(data, kind, n, int(out.shape(1)), group, minimum);
  if (row < 0 || row + int(out.shape(0)) > n) refuse("rows outside of the matrix");
  for (int r = 0; r < int(out.shape(0)); ++r) unpack_row(w, row + r, out.data() + size_t(r) * w.k);
}

// The product alone, for models that run module by module.
class LinearOp {
 public:
  LinearOp(Vector<const uint8_t> data, const std::string& kind, int n, int k, int group, bool minimum, int threads)
      : keep_(nb::cast(data)), w_(packed_of(data, kind, n, k, group, minimum)), team_(Team::of(threads)) {}

  void run(Matrix<const float> x, Matrix<float> out) {
    const int m = int(x.shape(0));
    if (int(x.shape(1)) != w_.k || int(out.shape(0)) != m || int(out.shape(1)) != w_.n)
      refuse("x must be [m, k] and out [m, n]");
    const float* in = x.data();
    float* to = out.data();
    nb::gil_scoped_release release;
    std::lock_guard lock(*team_.busy);
    Pool& pool = *team_.pool;
    const Rows rows = Rows::at(memory_.fit(Rows::bytes(w_.kind, m, w_.padded_k())), w_, m);
    scratch_.resize(pool.size());
    for (auto& unpacked : scratch_) unpacked.fit(w_);
    tickets_.reset();
    const int unit = std::max(6, w_.blocks() / (pool.active() * 8) / 6 * 6);
    pool.run([&](int thread) {
      const int threads = pool.active();
      for (int r = m * thread / threads; r < m * (thread + 1) / threads; ++r) rows.put(r, 0, w_.k, in + size_t(r) * w_.k);
      pool.barrier();
      for (int first; (first = tickets_.take() * unit) < w_.blocks();)
        product(w_, rows, m, first, std::min(w_.blocks(), first + unit), false, nullptr, scratch_[thread],
                [&](int row, int count, int block, int blocks, const float* tile) {
                  const int n = block * LANES, width = std::min(blocks * LANES, w_.n - n);
                  for (int i = 0; i < count; ++i)
                    std::memcpy(to + size_t(row + i) * w_.n + n, tile + i * blocks * LANES, size_t(width) * 4);
                });
    });
  }

 private:
  nb::object keep_;
  Linear w_;
  Team team_;
  Buffer memory_;
  std::vector<Unpacked> scratch_;
  Tickets tickets_;
};

}  // namespace anyrig
