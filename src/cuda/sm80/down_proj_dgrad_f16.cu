// down_proj_dgrad of f16.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/down_proj_dgrad.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<DownProjDgrad::ConfigOf<__half, false>>;
template struct Compiled<DownProjDgrad::ConfigOf<__half, true>>;

}  // namespace sonicmoe::cuda::sm80
