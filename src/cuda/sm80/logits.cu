// The router's logits.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/router_gemm.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<LogitsConfig<__nv_bfloat16>>;
template struct Compiled<LogitsConfig<__half>>;

}  // namespace sonicmoe::cuda::sm80
