// Products that store rows, of bf16: down_proj, up_proj_dgrad and the router's dx.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/rows.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<RowsConfig<__nv_bfloat16, true>>;
template struct Compiled<RowsConfig<__nv_bfloat16, false>>;

}  // namespace sonicmoe::cuda::sm80
