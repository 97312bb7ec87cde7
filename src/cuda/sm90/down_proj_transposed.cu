// down_proj of transposed weights, in wide tiles.
#include "cuda/sm90/down_proj.cuh"
#include "cuda/sm90/kernel_file.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<WideDownProj::Family<true>>;

}  // namespace sonicmoe::cuda
