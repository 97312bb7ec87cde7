// down_proj by the pingpong schedule.
#include "cuda/sm90/down_proj.cuh"
#include "cuda/sm90/kernel_file.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<PingpongDownProj::Family<false>>;

}  // namespace sonicmoe::cuda
