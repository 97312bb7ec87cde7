#pragma once

#include "cuda/sm80/launch.cuh"

/// Products whose rows are K: a matrix of each expert, or of each part of the tokens. N runs along
/// the contiguous axis of the output.
namespace sonicmoe::cuda::sm80 {

template <class T>
using MatrixConfig = Config<T, RowsAlongK<T>, RowsAlongK<T>, kNarrow, StoreMatrix>;

template <class F>
Status visit_matrices(DType dtype, F&& f) {
  return visit_storage(dtype, [&](auto type) { return f(MatrixConfig<decltype(type)>{}); });
}

/// Rows of one operand, of `count` parts of `width` columns.
inline Rows columns_of(const void* base, const std::int32_t* row_tokens, std::int64_t width,
                       int count) {
  return {.base = base,
          .row_tokens = row_tokens,
          .part_offset = width,
          .stride = stride_of(count * width),
          .width = static_cast<int>(width),
          .half = tiles(width, kNarrow)};
}

/// Sets how many tiles the operands make, and launches.
template <class Config>
Status launch_tiles(Params<Config> p, int m_parts, int n_parts, const Exec& exec,
                    const char* what) {
  p.extents.m_blocks = m_parts * p.a.half;
  p.extents.n_blocks = n_parts * p.b.half;
  p.epilogue.rows = p.a.width;
  p.epilogue.columns = p.b.width;
  p.epilogue.m_half = p.a.half;
  p.epilogue.n_half = p.b.half;
  const std::int64_t tiles =
      std::int64_t{p.extents.experts} * p.extents.m_blocks * p.extents.n_blocks;
  return Compiled<Config>::launch(p, tiles, exec, what);
}

/// The same for a gradient of the experts' weights.
template <class Config>
Status launch_matrices(Params<Config> p, const GroupedGemmDesc& d, const GroupedGemmArgs& a,
                       int m_parts, int n_parts, const Exec& exec, const char* what) {
  p.extents = extents_of(d, a, 0);
  p.extents.expert_order = a.expert_order;
  p.epilogue.f32 = d.f32_weight_grads;
  p.epilogue.accumulate = d.accumulate_weight_grads;
  return launch_tiles<Config>(p, m_parts, n_parts, exec, what);
}

}  // namespace sonicmoe::cuda::sm80
