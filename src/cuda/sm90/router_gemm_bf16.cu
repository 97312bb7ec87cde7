// The router's products of bf16.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/router_gemm.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<RouterFamily<__nv_bfloat16, 256>, RouterGemmDesc>;
template struct KernelFile<RouterFamily<__nv_bfloat16, 128>, RouterGemmDesc>;
template struct KernelFile<RouterFamily<__nv_bfloat16, 64>, RouterGemmDesc>;

}  // namespace sonicmoe::cuda
