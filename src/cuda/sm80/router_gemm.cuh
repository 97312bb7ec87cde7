#pragma once

#include "cuda/sm80/launch.cuh"

/// The kernel of the router's logits = x Wr^T + bias: M = tokens, N = experts, K = d.
namespace sonicmoe::cuda::sm80 {

template <class T, bool kSplit>
struct LogitsConfig : Config<T, RowsAlongM<T, kThreadsOf<kNarrow>>, WeightsAlongK<T, kNarrow>,
                             kNarrow, StoreLogits<kSplit>> {
  static constexpr bool kSplitLogits = kSplit;
};

template <class Config>
inline constexpr bool kMakesLogits = false;
template <class T, bool kSplit>
inline constexpr bool kMakesLogits<LogitsConfig<T, kSplit>> = true;

}  // namespace sonicmoe::cuda::sm80
