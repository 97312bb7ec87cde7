// down_proj_dgrad of bf16.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/down_proj_dgrad.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<DownProjDgrad::ConfigOf<__nv_bfloat16, false>>;
template struct Compiled<DownProjDgrad::ConfigOf<__nv_bfloat16, true>>;

}  // namespace sonicmoe::cuda::sm80
