#pragma once

#include "cuda/sm80/launch.cuh"

/// Products whose rows are M and are stored as they are: Y = A W2^T + b2, dX~ = dH W1, and the
/// router's dx = dlogits Wr.
namespace sonicmoe::cuda::sm80 {

template <class T, bool kContiguousK, int kTileN>
using RowsConfig =
    Config<T, RowsAlongM<T, kThreadsOf<kTileN>>,
           std::conditional_t<kContiguousK, WeightsAlongK<T, kTileN>, WeightsAlongN<T, kTileN>>,
           kTileN, StoreRows>;

/// Calls f(RowsConfig{}) for weights whose K is contiguous, or N.
template <int kTileN>
struct RowsOf {
  template <class T, bool kContiguousK>
  using Config = RowsConfig<T, kContiguousK, kTileN>;

  template <class F>
  static Status visit(DType dtype, bool contiguous_k, F&& f) {
    return visit_configs<Config>(dtype, contiguous_k, f);
  }
};

inline std::string defer_rows(const GroupedGemmDesc& d, const DeviceTraits& device) {
  return defer_to_narrow(device, m_blocks(d.usual_rows(), d.experts), tiles(d.hidden, 256),
                         tiles(d.hidden, 128));
}

}  // namespace sonicmoe::cuda::sm80
