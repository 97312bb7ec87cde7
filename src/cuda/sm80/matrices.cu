// Weight gradients: down_proj_wgrad, up_proj_wgrad and the router's dWr.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/matrices.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<MatrixConfig<__nv_bfloat16>>;
template struct Compiled<MatrixConfig<__half>>;

}  // namespace sonicmoe::cuda::sm80
