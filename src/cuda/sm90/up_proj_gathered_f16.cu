// up_proj with gathered rows of f16.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideUpProj, RowSource::gathered, __half>;
template struct KernelFile<NarrowUpProj, RowSource::gathered, __half>;

}  // namespace sonicmoe::cuda
