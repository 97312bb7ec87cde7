// down_proj_dgrad of transposed weights with contiguous rows of bf16.
#include "cuda/sm90/down_proj_dgrad.cuh"
#include "cuda/sm90/kernel_file.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideDownProjDgrad::Family<RowSource::contiguous, __nv_bfloat16, true>>;
template struct KernelFile<NarrowDownProjDgrad::Family<RowSource::contiguous, __nv_bfloat16, true>>;

}  // namespace sonicmoe::cuda
