// up_proj of bf16 with transposed weights.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/up_proj.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<UpProj<256>::ConfigOf<__nv_bfloat16, true>>;
template struct Compiled<UpProj<128>::ConfigOf<__nv_bfloat16, true>>;

}  // namespace sonicmoe::cuda::sm80
