// down_proj of transposed weights by the pingpong schedule.
#include "cuda/sm90/down_proj.cuh"
#include "cuda/sm90/kernel_file.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<PingpongDownProj::Family<true>>;

}  // namespace sonicmoe::cuda
