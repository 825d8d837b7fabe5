// Arrays from Python, and what is refused of them.
//
// Array arguments never convert: a mistyped or sliced array would be copied silently, and what is written to it lost.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "weights.h"

namespace anyrig {

namespace nb = nanobind;

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Cube = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(what); }

inline Kind kind_of(const std::string& name) {
  if (name == "float32") return Kind::f32;
  if (name == "bfloat16") return Kind::bf16;
  if (name == "int8") return Kind::int8;
  if (name == "int4") return Kind::int4;
  refuse("kind must be float32, bfloat16, int8 or int4. Given: " + name);
}

inline Linear shape_of(const std::string& kind, int n, int k, int group, bool minimum) {
  Linear w;
  w.kind = kind_of(kind), w.n = n, w.k = k, w.group = group, w.minimum = minimum;
  if (n < 1 || k < 1) refuse("a matrix needs rows and columns");
  if (w.kind == Kind::int4 && group != 32 && group != 64 && group != 128)
    refuse("group must be 32, 64 or 128. Given: " + std::to_string(group));
  return w;
}

inline Linear packed_of(const Vector<const uint8_t>& data, const std::string& kind, int n, int k, int group, bool minimum) {
  Linear w = shape_of(kind, n, k, group, minimum);
  if (data.size() != w.bytes())
    refuse("packed weights have " + std::to_string(data.size()) + " bytes, not " + std::to_string(w.bytes()));
  w.data = data.data();
  return w;
}

// The ragged batch as Python lays it out: chunk c is tokens[first[c]] ..., pages table[offset[c]] ...
inline std::vector<Chunk> chunks_of(const Vector<const int32_t>& lengths, const Vector<const int32_t>& starts,
                             const Vector<const int32_t>& table, const Vector<const int32_t>& offsets, int page_size,
                             int num_pages, int count) {
  const size_t n = lengths.size();
  if (starts.size() != n || offsets.size() != n + 1) refuse("a step has one start and one stretch of the table per chunk");
  std::vector<Chunk> chunks(n);
  int first = 0;
  for (size_t c = 0; c < n; ++c) {
    const int length = lengths.data()[c], start = starts.data()[c];
    const int from = offsets.data()[c], to = offsets.data()[c + 1];
    if (length < 1 || start < 0 || from < 0 || to < from || size_t(to) > table.size() ||
        to - from < ceil_div(start + length, page_size))
      refuse("chunk " + std::to_string(c) + " has no pages for its positions");
    for (int i = from; i < to; ++i)
      if (table.data()[i] < 0 || table.data()[i] >= num_pages) refuse("a page that does not exist");
    chunks[c] = {first, length, start, table.data() + from};
    first += length;
  }
  if (first > count) refuse("chunks are longer than the flat batch");
  return chunks;
}

}  // namespace anyrig
