// down_proj_dgrad of f16 with transposed weights.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/down_proj_dgrad.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<DownProjDgrad<256>::ConfigOf<__half, true>>;
template struct Compiled<DownProjDgrad<128>::ConfigOf<__half, true>>;

}  // namespace sonicmoe::cuda::sm80
