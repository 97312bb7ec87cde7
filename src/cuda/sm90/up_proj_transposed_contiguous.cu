// up_proj of transposed weights with contiguous rows, in wide tiles.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideUpProj::Family<RowSource::contiguous, __nv_bfloat16, true>>;
template struct KernelFile<WideUpProj::Family<RowSource::contiguous, __half, true>>;

}  // namespace sonicmoe::cuda
