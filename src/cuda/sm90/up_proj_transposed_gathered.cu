// up_proj of transposed weights with gathered rows, in wide tiles.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideUpProj::Family<RowSource::gathered, __nv_bfloat16, true>>;
template struct KernelFile<WideUpProj::Family<RowSource::gathered, __half, true>>;

}  // namespace sonicmoe::cuda
