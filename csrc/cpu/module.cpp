// What Python sees of the kernels. Compiled once per instruction set into a module of its own (CMakeLists.txt).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_attention.h"
#include "bind_decoder.h"
#include "bind_linear.h"
#include "bind_sample.h"
#include "features.h"
#include "measure.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace anyrig;

// Raise when the order of packed weights changes: prepared files of another number are made anew.
constexpr int LAYOUT = 2;

NB_MODULE(ANYRIG_MODULE, m) {
  m.def("features", &features);
#if defined(__AVX512BF16__)
  m.attr("isa") = "avx512";
#elif defined(__AVX2__)
  m.attr("isa") = "avx2";
#else
  m.attr("isa") = "portable";
#endif
  m.attr("LAYOUT") = LAYOUT;

  m.def("packed_size", &packed_size, "kind"_a, "n"_a, "k"_a, "group"_a = 0, "minimum"_a = false,
        "Bytes of a packed [n, k] matrix.");
  m.def("pack", &pack, "kind"_a, "w"_a.noconvert(), "out"_a.noconvert(), "row"_a, "n"_a, "group"_a = 0,
        "minimum"_a = false, "Packs rows row .. row + len(w) of a matrix of n rows.");
  m.def("unpack", &unpack, "kind"_a, "data"_a.noconvert(), "out"_a.noconvert(), "row"_a, "n"_a, "group"_a = 0,
        "minimum"_a = false, "The opposite of pack, with what rounding left.");
  m.def("measure_read", [](size_t bytes, int threads) {
    nb::gil_scoped_release release;
    Pool pool(threads);
    return measure_read(pool, bytes) / 1e9;
  }, "bytes"_a, "threads"_a, "GB/s of reading that many bytes.");
  m.def("measure_gemm", [](const std::string& kind, int rows, int n, int k, int threads) {
    shape_of(kind, n, k, 32, true);
    nb::gil_scoped_release release;
    Pool pool(threads);
    return measure_product(pool, kind_of(kind), rows, n, k) / 1e9;
  }, "kind"_a, "m"_a, "n"_a, "k"_a, "threads"_a, "GFLOP/s (or GOP/s) of an [m, k] x [k, n] product.");

  m.def("draw", &draw, "logits"_a.noconvert(), "rows"_a.noconvert(), "temperature"_a.noconvert(),
        "uniform"_a.noconvert(), "min_p"_a.noconvert(), "top_k"_a.noconvert(), "top_p"_a.noconvert(),
        "ids"_a.noconvert(), "mark_dropped"_a, "threads"_a, "One token per row, at the caller's random numbers.");

  nb::class_<LinearOp>(m, "Linear")
      .def(nb::init<Vector<const uint8_t>, const std::string&, int, int, int, bool, int>(), "data"_a.noconvert(),
           "kind"_a, "n"_a, "k"_a, "group"_a, "minimum"_a, "threads"_a)
      .def("run", &LinearOp::run, "x"_a.noconvert(), "out"_a.noconvert());

  nb::class_<AttentionOp>(m, "Attention")
      .def(nb::init<int, int>(), "page_size"_a, "threads"_a)
      .def("prepare", &AttentionOp::prepare, "lengths"_a.noconvert(), "starts"_a.noconvert(), "table"_a.noconvert(),
           "offsets"_a.noconvert(), "num_pages"_a)
      .def("attend", &AttentionOp::attend<uint16_t>, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
           "k_pages"_a.noconvert(), "v_pages"_a.noconvert(), "scaling"_a, "window"_a, "softcap"_a,
           "sinks"_a.noconvert().none(), "write"_a, "out"_a.noconvert())
      .def("attend", &AttentionOp::attend<float>, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
           "k_pages"_a.noconvert(), "v_pages"_a.noconvert(), "scaling"_a, "window"_a, "softcap"_a,
           "sinks"_a.noconvert().none(), "write"_a, "out"_a.noconvert());

  nb::class_<DecoderOp>(m, "Decoder")
      .def(nb::init<int, int, int, float, const std::string&, int, bool, float, float, float>(), "threads"_a, "vocab"_a,
           "hidden"_a, "eps"_a, "kind"_a, "group"_a, "minimum"_a, "embed_scale"_a, "logit_scale"_a, "final_softcap"_a)
      .def("set_ends", &DecoderOp::set_ends, "kind"_a, "embed"_a.noconvert(), "head"_a.noconvert(), "final_norm"_a.noconvert())
      .def("add_rope", &DecoderOp::add_rope, "inv_freq"_a.noconvert(), "scaling"_a, "interleaved"_a)
      .def("add_layer", &DecoderOp::add_layer, nb::kw_only(), "heads"_a, "kv_heads"_a, "dim"_a, "v_dim"_a, "scaling"_a,
           "window"_a, "softcap"_a, "rope"_a, "intermediate"_a, "activation"_a, "multiplier"_a, "qkv"_a.noconvert(),
           "o"_a.noconvert(), "gate_up"_a.noconvert(), "down"_a.noconvert(), "vectors"_a)
      .def("allocate", &DecoderOp::allocate, "num_pages"_a, "page_size"_a, "kind"_a, "pinned"_a)
      .def("page_bytes", &DecoderOp::page_bytes, "page_size"_a, "kind"_a)
      .def("scrub", &DecoderOp::scrub, "pages"_a)
      .def("step", &DecoderOp::step, "tokens"_a.noconvert(), "lengths"_a.noconvert(), "starts"_a.noconvert(),
           "table"_a.noconvert(), "offsets"_a.noconvert(), "rows"_a.noconvert(), "best"_a.noconvert(),
           "best_logit"_a.noconvert(), "logits"_a.noconvert().none())
      .def("profile", &DecoderOp::profile)
      .def_prop_ro("threads", &DecoderOp::threads)
      .def_prop_ro("workspace_bytes", &DecoderOp::workspace_bytes);
}
