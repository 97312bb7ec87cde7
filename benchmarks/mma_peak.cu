// The peak of mma.sync on this GPU: registers alone, many random fragments, held for 100 ms.
//
//   nvcc -O3 -std=c++17 -arch=native benchmarks/mma_peak.cu -o mma_peak && ./mma_peak
//
// Every warp multiplies 4 x 8 fragments of 16 x 8 x 16 in bf16 with fp32 sums, as the portable
// kernels do, and takes its operands in turn from eight sets of normal random numbers, as the
// benchmark's tensors have. One set repeated, or numbers of equal exponents, would toggle fewer
// wires, draw less power and look faster. Before it is timed, the chip multiplies for 5 s, as
// before `sonicmoe bench --steady-state`: from idle it clocks higher. Prints a line of JSON.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr int kThreads = 256, kSets = 8, kRounds = 64;

__device__ __forceinline__ std::uint32_t random_bits(std::uint32_t seed) {
  seed ^= seed >> 16, seed *= 0x7feb352du, seed ^= seed >> 15, seed *= 0x846ca68bu;
  return seed ^ seed >> 16;
}
__device__ __forceinline__ float normal(std::uint32_t seed) {
  const float u = (random_bits(2 * seed) + 1.0f) / 4294967808.0f;
  const float v = random_bits(2 * seed + 1) / 4294967296.0f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}
__device__ __forceinline__ std::uint32_t random_pair(std::uint32_t seed) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(normal(2 * seed), normal(2 * seed + 1));
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__global__ void __launch_bounds__(kThreads, 1) multiply(float* out, int repeats) {
  __shared__ std::uint32_t sets[kSets][kThreads];
  for (int set = 0; set < kSets; ++set) {
    sets[set][threadIdx.x] = random_pair((blockIdx.x * kSets + set) * kThreads + threadIdx.x);
  }
  __syncthreads();
  float sums[4][8][4] = {};
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (int round = 0; round < kRounds; ++round) {
      std::uint32_t a[4][4], b[8][2];
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
          a[i][j] = sets[(round + i) % kSets][(threadIdx.x + 37 * j) % kThreads];
        }
      }
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 2; ++j) {
          b[i][j] = sets[(round + i) % kSets][(threadIdx.x + 91 * j + 11) % kThreads];
        }
      }
#pragma unroll
      for (int again = 0; again < 8; ++again) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            float(&d)[4] = sums[m][n];
            const auto& x = a[(m + again) % 4];
            const auto& y = b[(n + again) % 8];
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
          }
        }
      }
    }
  }
  float sum = 0;
  for (auto& m : sums) {
    for (auto& n : m) sum += n[0] + n[1] + n[2] + n[3];
  }
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

}  // namespace

int main() {
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
    std::fprintf(stderr, "mma_peak: there is no CUDA device\n");
    return 1;
  }
  const int blocks = device.multiProcessorCount;
  float* out = nullptr;
  cudaMalloc(&out, sizeof(float) * blocks * kThreads);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  const double flops_of_repeat = 2.0 * 16 * 8 * 16 * 32 * 8 * kRounds * (kThreads / 32) * blocks;
  const auto time = [&](int repeats) {
    cudaEventRecord(begin);
    multiply<<<blocks, kThreads>>>(out, repeats);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    return ms;
  };
  time(1);
  const int repeats = static_cast<int>(100.0f / time(8) * 8) + 1;  // 100 ms
  for (int i = 0; i < 50; ++i) time(repeats);                      // 5 s
  const float ms = time(repeats);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    std::fprintf(stderr, "mma_peak: %s\n", cudaGetErrorString(error));
    return 1;
  }
  std::printf("{\"device\": \"%s\", \"milliseconds\": %.1f, \"tflops\": %.1f}\n", device.name, ms,
              flops_of_repeat * repeats / ms * 1e-9);
}
