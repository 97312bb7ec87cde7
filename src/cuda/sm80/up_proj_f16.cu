// up_proj of f16.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/up_proj.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<UpProj<256>::ConfigOf<__half, false>>;
template struct Compiled<UpProj<128>::ConfigOf<__half, false>>;

}  // namespace sonicmoe::cuda::sm80
