// up_proj of f16 with transposed weights.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/up_proj.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<UpProj<256>::ConfigOf<__half, true>>;
template struct Compiled<UpProj<128>::ConfigOf<__half, true>>;

}  // namespace sonicmoe::cuda::sm80
