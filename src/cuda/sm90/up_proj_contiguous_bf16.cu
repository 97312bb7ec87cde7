// up_proj with contiguous rows of bf16.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideUpProj, RowSource::contiguous, __nv_bfloat16>;
template struct KernelFile<NarrowUpProj, RowSource::contiguous, __nv_bfloat16>;

}  // namespace sonicmoe::cuda
