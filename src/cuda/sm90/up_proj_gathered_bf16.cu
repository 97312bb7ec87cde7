// up_proj with gathered rows of bf16.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideUpProj, RowSource::gathered, __nv_bfloat16>;
template struct KernelFile<NarrowUpProj, RowSource::gathered, __nv_bfloat16>;

}  // namespace sonicmoe::cuda
