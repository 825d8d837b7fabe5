// Sixteen lanes of float or int, on whatever the instruction set offers.
//
// A `Vec` is one AVX512 register, two of AVX2 or four of SSE. GCC's vector extension does the arithmetic on each part;
// intrinsics stand only where an instruction set has a dot product or a conversion of its own. (One 64-byte vector of the
// extension would do for AVX512, but elsewhere GCC takes it apart into single lanes.) Every function is inlined: nothing
// here may become a symbol that a linker could share between objects built for different processors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ANYRIG_INLINE inline __attribute__((always_inline))

namespace anyrig {

constexpr int LANES = 16;
constexpr float INF = std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int PARTS = 64 / REGISTER;

template <class T>
struct PartOf;
template <>
struct PartOf<float> {
  using Type = float __attribute__((vector_size(REGISTER)));
};
template <>
struct PartOf<int32_t> {
  using Type = int32_t __attribute__((vector_size(REGISTER)));
};
template <>
struct PartOf<uint32_t> {
  using Type = uint32_t __attribute__((vector_size(REGISTER)));
};

template <class T>
struct Vec {
  using Part = typename PartOf<T>::Type;
  Part p[PARTS];

  Vec() = default;
  ANYRIG_INLINE Vec(T x) {
    for (int i = 0; i < PARTS; ++i) p[i] = Part{} + x;
  }
  ANYRIG_INLINE T operator[](int lane) const { return p[lane / (REGISTER / 4)][lane % (REGISTER / 4)]; }
  ANYRIG_INLINE void set(int lane, T x) { p[lane / (REGISTER / 4)][lane % (REGISTER / 4)] = x; }
};

using f32x16 = Vec<float>;
using i32x16 = Vec<int32_t>;
using u32x16 = Vec<uint32_t>;

// Lane by lane; where one operand is a number it counts for all lanes. Comparisons give 0 or -1.
#define ANYRIG_OPERATOR(op)                                                                 \
  template <class T>                                                                        \
  ANYRIG_INLINE Vec<T> operator op(const Vec<T>& a, const Vec<T>& b) {                      \
    Vec<T> c;                                                                               \
    for (int i = 0; i < PARTS; ++i) c.p[i] = a.p[i] op b.p[i];                              \
    return c;                                                                               \
  }                                                                                         \
  template <class T>                                                                        \
  ANYRIG_INLINE Vec<T> operator op(const Vec<T>& a, T b) { return a op Vec<T>(b); }         \
  template <class T>                                                                        \
  ANYRIG_INLINE Vec<T> operator op(T a, const Vec<T>& b) { return Vec<T>(a) op b; }         \
  template <class T>                                                                        \
  ANYRIG_INLINE Vec<T>& operator op##=(Vec<T>& a, const Vec<T>& b) { return a = a op b; }    \
  template <class T>                                                                        \
  ANYRIG_INLINE Vec<T>& operator op##=(Vec<T>& a, T b) { return a = a op Vec<T>(b); }
ANYRIG_OPERATOR(+)
ANYRIG_OPERATOR(-)
ANYRIG_OPERATOR(*)
ANYRIG_OPERATOR(/)
ANYRIG_OPERATOR(&)
ANYRIG_OPERATOR(|)
ANYRIG_OPERATOR(^)
#undef ANYRIG_OPERATOR

#define ANYRIG_COMPARISON(op)                                                               \
  template <class T>                                                                        \
  ANYRIG_INLINE i32x16 operator op(const Vec<T>& a, const Vec<T>& b) {                      \
    i32x16 c;                                                                               \
    for (int i = 0; i < PARTS; ++i) c.p[i] = (i32x16::Part)(a.p[i] op b.p[i]);              \
    return c;                                                                               \
  }                                                                                         \
  template <class T>                                                                        \
  ANYRIG_INLINE i32x16 operator op(const Vec<T>& a, T b) { return a op Vec<T>(b); }
ANYRIG_COMPARISON(<)
ANYRIG_COMPARISON(>)
ANYRIG_COMPARISON(<=)
ANYRIG_COMPARISON(>=)
ANYRIG_COMPARISON(==)
ANYRIG_COMPARISON(!=)
#undef ANYRIG_COMPARISON

template <class T>
ANYRIG_INLINE Vec<T> operator<<(const Vec<T>& a, int bits) {
  Vec<T> c;
  for (int i = 0; i < PARTS; ++i) c.p[i] = a.p[i] << bits;
  return c;
}

template <class T>
ANYRIG_INLINE Vec<T> operator>>(const Vec<T>& a, int bits) {
  Vec<T> c;
  for (int i = 0; i < PARTS; ++i) c.p[i] = a.p[i] >> bits;
  return c;
}

ANYRIG_INLINE f32x16 operator-(const f32x16& a) {
  f32x16 c;
  for (int i = 0; i < PARTS; ++i) c.p[i] = -a.p[i];
  return c;
}

// Lanes of `yes` where the mask is -1, of `no` where it is 0.
template <class T>
ANYRIG_INLINE Vec<T> select(const i32x16& mask, const Vec<T>& yes, const Vec<T>& no) {
  Vec<T> c;
  for (int i = 0; i < PARTS; ++i) c.p[i] = mask.p[i] ? yes.p[i] : no.p[i];
  return c;
}

template <class V>
ANYRIG_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
ANYRIG_INLINE void store(void* p, const V& v) {
  std::memcpy(p, &v, sizeof v);
}

// Part by part: copied as 64 bytes, a Vec of several registers would live in memory.
template <class V>
  requires requires { typename V::Part; }
ANYRIG_INLINE V load(const void* p) {
  V v;
  for (int i = 0; i < PARTS; ++i) std::memcpy(&v.p[i], static_cast<const char*>(p) + i * REGISTER, REGISTER);
  return v;
}

template <class T>
ANYRIG_INLINE void store(void* p, const Vec<T>& v) {
  for (int i = 0; i < PARTS; ++i) std::memcpy(static_cast<char*>(p) + i * REGISTER, &v.p[i], REGISTER);
}

ANYRIG_INLINE f32x16 splat(float x) { return f32x16(x); }
ANYRIG_INLINE i32x16 splat(int32_t x) { return i32x16(x); }

// Bits of one type read as the other.
template <class To, class From>
ANYRIG_INLINE To bits_of(const From& v) {
  To to;
  for (int i = 0; i < PARTS; ++i) to.p[i] = (typename To::Part)v.p[i];
  return to;
}
ANYRIG_INLINE f32x16 as_f32(const i32x16& v) { return bits_of<f32x16>(v); }
ANYRIG_INLINE i32x16 as_i32(const f32x16& v) { return bits_of<i32x16>(v); }

ANYRIG_INLINE f32x16 to_f32(const i32x16& v) {
  f32x16 c;
  for (int i = 0; i < PARTS; ++i) c.p[i] = __builtin_convertvector(v.p[i], f32x16::Part);
  return c;
}

// Sixteen 16-bit numbers, zero-extended.
ANYRIG_INLINE i32x16 load_u16(const void* p) {
  i32x16 v;
  for (int i = 0; i < PARTS; ++i) {
    using Half = uint16_t __attribute__((vector_size(REGISTER / 2)));
    Half h;
    std::memcpy(&h, static_cast<const char*>(p) + i * sizeof h, sizeof h);
    v.p[i] = __builtin_convertvector(h, i32x16::Part);
  }
  return v;
}

// The lanes' numbers, counted from `first`.
ANYRIG_INLINE i32x16 lanes_from(int32_t first) {
  static constexpr int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<i32x16>(numbers) + first;
}

ANYRIG_INLINE f32x16 max(const f32x16& a, const f32x16& b) { return select(a > b, a, b); }
ANYRIG_INLINE f32x16 min(const f32x16& a, const f32x16& b) { return select(a < b, a, b); }
ANYRIG_INLINE f32x16 abs(const f32x16& a) { return as_f32(as_i32(a) & 0x7fffffff); }

// Sums and maxima over lanes, always in the same order of halves.
ANYRIG_INLINE float reduce_add(const f32x16& v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v.p[0]);
#else
  float x[LANES];
  store(x, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
#endif
}

ANYRIG_INLINE float reduce_max(const f32x16& v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v.p[0]);
#else
  float x[LANES];
  store(x, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
#endif
}

// Sum of all lanes; wraps around.
ANYRIG_INLINE uint32_t reduce_add(const u32x16& v) {
#if defined(__AVX512F__)
  return uint32_t(_mm512_reduce_add_epi32((__m512i)v.p[0]));
#else
  uint32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
#endif
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
ANYRIG_INLINE i32x16 round_i32(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);
  return bits_of<i32x16>(bits_of<u32x16>(x + magic) - bits_of<u32x16>(magic));
}

// e^x to about 1 ulp: 2^n * e^r with |r| <= ln(2) / 2 and a polynomial of degree 6 (Cephes' expf splits ln 2 so).
ANYRIG_INLINE f32x16 exp(const f32x16& given) {
  const f32x16 x = min(max(given, splat(-87.336f)), splat(88.3f));
  const i32x16 n = round_i32(x * 1.44269504089f);
  const f32x16 nf = to_f32(n);
  const f32x16 r = (x - nf * 0.693359375f) + nf * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return select(given != given, given, as_f32(as_i32(p) + (n << 23)));  // NaN stays NaN
}

// tanh by way of e^2x; small arguments by x alone would lose digits, so they take the odd series' first terms.
ANYRIG_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 e = exp(min(splat(15.0f), max(splat(-15.0f), x)) * 2.0f);  // in this order, NaN passes
  const f32x16 wide = (e - 1.0f) / (e + 1.0f);
  const f32x16 x2 = x * x;
  const f32x16 narrow = x * (1.0f + x2 * (-0.333333333f + x2 * 0.133333333f));
  return select(abs(x) < 0.05f, narrow, wide);
}

// bfloat16 is the upper half of a float32.
ANYRIG_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

ANYRIG_INLINE float from_bf16(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Sixteen numbers as bfloat16 (32 bytes), rounded to nearest even.
ANYRIG_INLINE void store_bf16(void* p, const f32x16& v) {
#if defined(__AVX512BF16__)
  store(p, _mm512_cvtneps_pbh((__m512)v.p[0]));
#else
  auto* out = static_cast<char*>(p);
  const u32x16 bits = bits_of<u32x16>(v);
  const u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  const u32x16 half = select((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded);
  for (int i = 0; i < PARTS; ++i) {
    using Half = uint16_t __attribute__((vector_size(REGISTER / 2)));
    const Half h = __builtin_convertvector(half.p[i], Half);
    std::memcpy(out + i * sizeof h, &h, sizeof h);
  }
#endif
}

// Sixteen small integers as bytes.
ANYRIG_INLINE void store_i8(void* p, const i32x16& v) {
#if defined(__AVX512F__)
  store(p, _mm512_cvtepi32_epi8((__m512i)v.p[0]));
#else
  for (int i = 0; i < LANES; ++i) static_cast<int8_t*>(p)[i] = int8_t(v[i]);
#endif
}

// IEEE half precision, for the scales of int4 groups.
ANYRIG_INLINE float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 0) return std::copysign(float(fraction) * 0x1p-24f, sign ? -1.0f : 1.0f);
  const uint32_t bits = exponent == 31 ? sign | 0x7f800000 | fraction << 13 : sign | (exponent + 112) << 23 | fraction << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

ANYRIG_INLINE uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float a = std::fabs(x);
  if (!(a < 65520.0f)) return sign | (a != a ? 0x7e00 : 0x7c00);
  if (a < 0x1p-14f) return sign | uint16_t(std::nearbyint(a * 0x1p24f));
  uint32_t m;
  std::memcpy(&m, &a, 4);
  m += 0xfff + ((m >> 13) & 1);
  return sign | uint16_t((m >> 13) - (112 << 10));
}

ANYRIG_INLINE f32x16 load_f16(const void* p) {
  f32x16 v;
#if defined(__AVX512F__)
  v.p[0] = (f32x16::Part)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__)
  for (int i = 0; i < PARTS; ++i)
    v.p[i] = (f32x16::Part)_mm256_cvtph_ps(load<__m128i>(static_cast<const char*>(p) + i * 16));
#else
  uint16_t h[LANES];
  float x[LANES];
  std::memcpy(h, p, sizeof h);
  for (int i = 0; i < LANES; ++i) x[i] = from_f16(h[i]);
  v = load<f32x16>(x);
#endif
  return v;
}

// acc[i] += sum of u[4i + j] * s[j]: unsigned bytes `u` against four signed bytes, the same for all lanes. Exact.
ANYRIG_INLINE i32x16 dot_u8s8(i32x16 acc, const i32x16& u, int32_t s) {
#if defined(__AVX512VNNI__)
  acc.p[0] = (i32x16::Part)_mm512_dpbusd_epi32((__m512i)acc.p[0], (__m512i)u.p[0], _mm512_set1_epi32(s));
#elif defined(__AVX2__)
  // pmaddubsw would saturate; bytes 0, 2 and bytes 1, 3 as 16-bit numbers do not.
  const __m256i byte = _mm256_set1_epi16(0x00ff), both = _mm256_set1_epi32(s);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8), odd = _mm256_srai_epi16(both, 8);
  for (int i = 0; i < PARTS; ++i) {
    const auto v = (__m256i)u.p[i];
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(v, byte), even),
                                         _mm256_madd_epi16(_mm256_srli_epi16(v, 8), odd));
    acc.p[i] += (i32x16::Part)sum;
  }
#else
  const auto v = bits_of<u32x16>(u);
  for (int j = 0; j < 4; ++j)
    acc += bits_of<i32x16>((v >> (8 * j)) & 255u) * int32_t(int8_t(uint32_t(s) >> (8 * j)));
#endif
  return acc;
}

// acc[i] += w[2i] * a[0] + w[2i + 1] * a[1], all bfloat16 but the sum.
ANYRIG_INLINE f32x16 dot_bf16(f32x16 acc, const i32x16& w, int32_t a) {
#if defined(__AVX512BF16__)
  acc.p[0] = (f32x16::Part)_mm512_dpbf16_ps((__m512)acc.p[0], (__m512bh)(__m512i)w.p[0], (__m512bh)_mm512_set1_epi32(a));
  return acc;
#else
  float low, high;
  const uint32_t bits = uint32_t(a), l = bits << 16, h = bits & 0xffff0000;
  std::memcpy(&low, &l, 4);
  std::memcpy(&high, &h, 4);
  acc += as_f32(w << 16) * low;
  return acc + as_f32(w & int32_t(0xffff0000)) * high;
#endif
}

ANYRIG_INLINE int32_t load_i32(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

ANYRIG_INLINE int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }
ANYRIG_INLINE int ceil_div(int x, int unit) { return (x + unit - 1) / unit; }

}  // namespace anyrig
