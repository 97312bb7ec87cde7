// up_proj with gathered rows, in narrow tiles.
#include "cuda/sm90/kernel_file.cuh"
#include "cuda/sm90/up_proj.cuh"

namespace sonicmoe::cuda {

template struct KernelFile<NarrowUpProj::Family<RowSource::gathered, __nv_bfloat16, false>>;
template struct KernelFile<NarrowUpProj::Family<RowSource::gathered, __half, false>>;

}  // namespace sonicmoe::cuda
