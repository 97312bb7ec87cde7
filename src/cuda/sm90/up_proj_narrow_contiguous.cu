// up_proj with contiguous rows, in narrow tiles.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<NarrowUpProj::Family<RowSource::contiguous, __nv_bfloat16, false>>;
template struct KernelFile<NarrowUpProj::Family<RowSource::contiguous, __half, false>>;

}  // namespace sonicmoe::cuda
