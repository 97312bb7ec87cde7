#pragma once

#include "cuda/sm80/launch.cuh"

/// Products whose rows are M and are stored as they are: Y = A W2^T + b2, dX~ = dH W1, and the
/// router's dx = dlogits Wr.
namespace sonicmoe::cuda::sm80 {

template <class T, bool kContiguousK>
using RowsConfig =
    Config<T, RowsAlongM<T, kThreadsOf<128>>,
           std::conditional_t<kContiguousK, WeightsAlongK<T, 128>, WeightsAlongN<T, 128>>, 128,
           StoreRows>;

}  // namespace sonicmoe::cuda::sm80
