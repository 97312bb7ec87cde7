// up_proj with gathered rows of bf16, in wide tiles.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideUpProj::Family<RowSource::gathered, __nv_bfloat16, false>>;

}  // namespace sonicmoe::cuda
