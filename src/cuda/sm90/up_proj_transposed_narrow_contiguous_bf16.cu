// up_proj of transposed weights with contiguous rows of bf16, in narrow tiles.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<NarrowUpProj::Family<RowSource::contiguous, __nv_bfloat16, true>>;

}  // namespace sonicmoe::cuda
