// down_proj_dgrad of bf16 with transposed weights.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/down_proj_dgrad.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<DownProjDgrad<256>::ConfigOf<__nv_bfloat16, true>>;
template struct Compiled<DownProjDgrad<128>::ConfigOf<__nv_bfloat16, true>>;

}  // namespace sonicmoe::cuda::sm80
