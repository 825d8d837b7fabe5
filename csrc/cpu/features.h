// Instruction sets that this CPU has and whose registers the operating system saves, by the compilers' names.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace anyrig {

inline std::vector<std::string> features() {
  std::vector<std::string> found;
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool fma = c & (1u << 12), f16c = c & (1u << 29);
  unsigned saved = 0;
  if (c & (1u << 27)) {
    unsigned high;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  }
  if ((saved & 0x6) != 0x6) return found;
  if (fma) found.push_back("fma");
  if (f16c) found.push_back("f16c");
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  if (b & (1u << 5)) found.push_back("avx2");
  if (b & (1u << 8)) found.push_back("bmi2");
  if ((saved & 0xe6) != 0xe6) return found;
  if (b & (1u << 16)) found.push_back("avx512f");
  if (b & (1u << 17)) found.push_back("avx512dq");
  if (b & (1u << 30)) found.push_back("avx512bw");
  if (b & (1u << 31)) found.push_back("avx512vl");
  if (c & (1u << 11)) found.push_back("avx512vnni");
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5))) found.push_back("avx512bf16");
#endif
  return found;
}

}  // namespace anyrig
