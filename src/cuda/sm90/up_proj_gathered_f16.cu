// up_proj with gathered rows of f16, in wide tiles.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideUpProj::Family<RowSource::gathered, __half, false>>;

}  // namespace sonicmoe::cuda
