// The router's logits.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/router_gemm.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<LogitsConfig<__nv_bfloat16, false>>;
template struct Compiled<LogitsConfig<__nv_bfloat16, true>>;
template struct Compiled<LogitsConfig<__half, false>>;
template struct Compiled<LogitsConfig<__half, true>>;

}  // namespace sonicmoe::cuda::sm80
