// up_proj of bf16.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/up_proj.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<UpProj<256>::ConfigOf<__nv_bfloat16, false>>;
template struct Compiled<UpProj<128>::ConfigOf<__nv_bfloat16, false>>;

}  // namespace sonicmoe::cuda::sm80
