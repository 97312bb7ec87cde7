// down_proj_dgrad with gathered rows of bf16.
#include "cuda/sm90/down_proj_dgrad.cuh"
#include "cuda/sm90/kernel_file.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideDownProjDgrad::Family<RowSource::gathered, __nv_bfloat16, false>>;
template struct KernelFile<NarrowDownProjDgrad::Family<RowSource::gathered, __nv_bfloat16, false>>;

}  // namespace sonicmoe::cuda
