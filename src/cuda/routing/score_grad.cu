// From the scores' gradients, row by row, to slot order (lists) or through the router to dense
// dlogits: sums over the K, softmax backward and the zeros in one pass, a token per warp.
#include <algorithm>

#include "core/backends.h"
#include "core/validate.h"
#include "cuda/routing/routing.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 8;             // tokens of a block
constexpr std::int64_t kTile = 1024;  // experts of a row at a time, in shared memory

/// Gradient of a slot's score; slots without a row have none.
struct SlotGradients {
  const float* row_dscores;
  const std::int32_t* slot_rows;
  __device__ float operator()(std::int64_t slot) const {
    const std::int32_t row = slot_rows[slot];
    return row < 0 ? 0.0f : row_dscores[row];
  }
};

__global__ void to_slot_order(SlotGradients gradient, std::int64_t slots, float* dscores) {
  const std::int64_t s = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  wait_for_previous();
  let_next_start();
  if (s < slots) dscores[s] = gradient(s);
}

/// kAllExperts: scores are probabilities p, so dlogit_e = p_e (g_e - inner) for every expert; else
/// scores have a softmax of their own and dlogit_k = s_k (g_k - inner). inner = sum_k g_k s_k.
/// kLanes lanes have a token's entries: all 32 for more than 16 of them, or where all experts have
/// something to do; else the loads of several tokens are on their way together.
template <class T, bool kAllExperts, int kLanes>
__global__ void __launch_bounds__(kWarps* kWarp, 3)
    score_grad(SlotGradients gradient, const float* slot_scores, const std::int32_t* slot_experts,
               const T* logits, const T* dlogits_in, T* dlogits, std::int64_t tokens,
               std::int64_t experts, int top_k, int tile) {
  constexpr int kTokens = kWarp / kLanes;
  static_assert(!kAllExperts || kTokens == 1);
  extern __shared__ float tiles[];  // (kWarps, tile)
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t first_token = (std::int64_t{blockIdx.x} * kWarps + warp) * kTokens;
  wait_for_previous();
  let_next_start();
  if (first_token >= tokens) return;
  float* const grad = tiles + warp * tile;

  // Lane k of a token has entry k; the few tokens with more load the others twice.
  const int my_token = lane_id() / kLanes;
  const std::int64_t first = (first_token + my_token) * top_k;
  const int my_entry = lane_id() % kLanes;
  const bool has = my_entry < top_k && first_token + my_token < tokens;
  const std::int32_t my_expert = has ? slot_experts[first + my_entry] : 0;
  const float my_score = has ? slot_scores[first + my_entry] : 0.0f;
  const float my_gradient = has ? gradient(first + my_entry) : 0.0f;
  float inner = 0.0f;  // every lane of a token the same sum, in slot order
  for (int k0 = 0; k0 < top_k; k0 += kLanes) {
    const int k = k0 + my_entry;
    const float g = k0 == 0 ? my_gradient : k < top_k ? gradient(first + k) : 0.0f;
    const float s = k0 == 0 ? my_score : k < top_k ? slot_scores[first + k] : 0.0f;
    const int left = min(kLanes, top_k - k0);
#pragma unroll 4
    for (int l = 0; l < left; ++l) {
      inner = math::fma(__shfl_sync(kAllLanes, g, l, kLanes), __shfl_sync(kAllLanes, s, l, kLanes),
                        inner);
    }
  }
  RowSoftmax softmax{};
  if constexpr (kAllExperts) softmax = row_softmax(logits + first_token * experts, experts);

  // The whole warp writes a row after the other.
  for (int i = 0; i < kTokens; ++i) {
    const std::int64_t t = first_token + i;
    if (t >= tokens) break;
    for (std::int64_t e0 = 0; e0 < experts; e0 += tile) {
      const int n = static_cast<int>(min(std::int64_t{tile}, experts - e0));
      for (int e = lane_id(); e < n; e += kWarp) {
        grad[e] = 0.0f;
        if constexpr (kAllExperts) {
          grad[e] = math::mul(-softmax.probability(to_float(logits[t * experts + e0 + e])), inner);
        }
      }
      __syncwarp();
      for (int k = my_entry; my_token == i && k < top_k; k += kLanes) {  // its experts differ
        const std::int64_t e = (k < kLanes ? my_expert : slot_experts[first + k]) - e0;
        if (e < 0 || e >= n) continue;
        const float g = k < kLanes ? my_gradient : gradient(first + k);
        const float s = k < kLanes ? my_score : slot_scores[first + k];
        grad[e] =
            kAllExperts ? math::add(grad[e], math::mul(s, g)) : math::mul(s, math::sub(g, inner));
      }
      __syncwarp();
      for (int e = lane_id(); e < n; e += kWarp) {
        const std::int64_t at = t * experts + e0 + e;
        const float outside = dlogits_in == nullptr ? 0.0f : to_float(dlogits_in[at]);
        dlogits[at] = from_float<T>(math::add(grad[e], outside));
      }
      __syncwarp();
    }
  }
}

template <class T>
Status run_typed(const ScoreGradDesc& d, const ScoreGradArgs& a, const Exec& exec) {
  const int tile = static_cast<int>(std::min(d.experts, kTile));
  const std::size_t bytes = 4 * static_cast<std::size_t>(kWarps * tile);
  const auto start = [&](auto kernel, int lanes) {
    launch_early(kernel, blocks_for(d.tokens, kWarps * (kWarp / lanes)), kWarps * kWarp, bytes,
                 stream_of(exec), SlotGradients{a.row_dscores, a.slot_rows}, a.slot_scores,
                 a.slot_experts, static_cast<const T*>(a.logits),
                 static_cast<const T*>(a.dlogits_in), static_cast<T*>(a.dlogits), d.tokens,
                 d.experts, static_cast<int>(d.top_k), tile);
  };
  if (needs_logits(d.mode, d.norm_topk_probs)) {
    start(score_grad<T, true, kWarp>, kWarp);
  } else if (d.top_k <= 4) {
    start(score_grad<T, false, 4>, 4);
  } else if (d.top_k <= 8) {
    start(score_grad<T, false, 8>, 8);
  } else if (d.top_k <= 16) {
    start(score_grad<T, false, 16>, 16);
  } else {
    start(score_grad<T, false, kWarp>, kWarp);
  }
  return launched("score_grad: launch");
}

Status run(const ScoreGradDesc& d, const ScoreGradArgs& a, void*, const Exec& exec) noexcept {
  if (d.mode == RouterMode::given) {
    if (d.rows == 0) return {};
    launch_early(to_slot_order, blocks_for(d.rows, 256), 256, 0, stream_of(exec),
                 SlotGradients{a.row_dscores, a.slot_rows}, d.rows, a.dscores);
    return launched("score_grad: launch");
  }
  if (d.tokens == 0) return {};
  return visit_logits(d.dtype, [&](auto type) { return run_typed<decltype(type)>(d, a, exec); });
}

}  // namespace

const Kernel<ScoreGradDesc> kScoreGrad = {"score_grad",
                                          "cuda.score_grad",
                                          DeviceType::cuda,
                                          takes_any_dtype<ScoreGradDesc>,
                                          no_workspace<ScoreGradDesc>,
                                          run};

}  // namespace sonicmoe::cuda
