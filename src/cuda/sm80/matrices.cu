// Weight gradients: down_proj_wgrad, up_proj_wgrad and the router's dWr.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/matrices.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<MatrixConfig<__nv_bfloat16, 256>>;
template struct Compiled<MatrixConfig<__nv_bfloat16, 128>>;
template struct Compiled<MatrixConfig<__half, 256>>;
template struct Compiled<MatrixConfig<__half, 128>>;

}  // namespace sonicmoe::cuda::sm80
