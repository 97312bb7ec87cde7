// The router's products of f16.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/router_gemm.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<RouterFamily<__half, 256>, RouterGemmDesc>;
template struct KernelFile<RouterFamily<__half, 128>, RouterGemmDesc>;
template struct KernelFile<RouterFamily<__half, 64>, RouterGemmDesc>;

}  // namespace sonicmoe::cuda
