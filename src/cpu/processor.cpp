#include <omp.h>

#include <cstring>
#include <fstream>
#include <string>

#include "core/backends.h"
#include "cpu/gemm.h"

namespace sonicmoe::cpu {

int usable_threads() { return omp_get_num_procs(); }

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "CPU";
}

std::string processor_details() {
  return std::to_string(usable_threads()) + " threads" +
         (Avx512Engine<float>::missing() == nullptr ? ", AVX-512" : "") +
         (Avx512Engine<math::Bf16>::missing() == nullptr ? ", AVX-512 BF16"
                                                         : ", bf16 through fp32");
}

std::string missing_feature() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "AVX2 and FMA";
#endif
  return {};
}

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace sonicmoe::cpu
