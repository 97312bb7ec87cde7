// down_proj_dgrad of transposed weights with contiguous rows of f16.
#include "cuda/sm90/down_proj_dgrad.cuh"
#include "cuda/sm90/kernel_file.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideDownProjDgrad::Family<RowSource::contiguous, __half, true>>;
template struct KernelFile<NarrowDownProjDgrad::Family<RowSource::contiguous, __half, true>>;

}  // namespace sonicmoe::cuda
