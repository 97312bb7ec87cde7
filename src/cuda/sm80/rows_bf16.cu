// Products that store rows, of bf16: down_proj, up_proj_dgrad and the router's dx.
#include "cuda/sm80/compiled.cuh"
#include "cuda/sm80/rows.cuh"

namespace sonicmoe::cuda::sm80 {

template struct Compiled<RowsConfig<__nv_bfloat16, true, 256>>;
template struct Compiled<RowsConfig<__nv_bfloat16, true, 128>>;
template struct Compiled<RowsConfig<__nv_bfloat16, false, 256>>;
template struct Compiled<RowsConfig<__nv_bfloat16, false, 128>>;

}  // namespace sonicmoe::cuda::sm80
