// down_proj_dgrad with contiguous rows of f16.
#include "cuda/sm90/down_proj_dgrad.cuh"
#include "cuda/sm90/kernel_file.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideDownProjDgrad, RowSource::contiguous, __half>;
template struct KernelFile<NarrowDownProjDgrad, RowSource::contiguous, __half>;

}  // namespace sonicmoe::cuda
