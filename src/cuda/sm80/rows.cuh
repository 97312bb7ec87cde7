#pragma once

#include "cuda/sm80/launch.cuh"

/// Products whose rows are M and are stored as they are: Y = A W2^T + b2, dX~ = dH W1, and the
/// router's dx = dlogits Wr.
namespace sonicmoe::cuda::sm80 {

template <class T, bool kContiguousK>
using RowsConfig =
    Config<T, RowsAlongM<T, kThreadsOf<kNarrow>>,
           std::conditional_t<kContiguousK, WeightsAlongK<T, kNarrow>, WeightsAlongN<T, kNarrow>>,
           kNarrow, StoreRows>;

}  // namespace sonicmoe::cuda::sm80
