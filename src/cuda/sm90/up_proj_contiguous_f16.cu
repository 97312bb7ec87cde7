// up_proj with contiguous rows of f16.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideUpProj, RowSource::contiguous, __half>;
template struct KernelFile<NarrowUpProj, RowSource::contiguous, __half>;

}  // namespace sonicmoe::cuda
