// Takes the gradients of the scores, one a row. Without logits it puts them into slot order. With
// logits it takes them back through the router to dense dlogits, in one pass: sums over a token's K
// entries, softmax backward, and zeros.
#include <algorithm>

#include "core/backends.h"
#include "cuda/routing/routing.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 8;                      // of a block
constexpr std::int64_t kRowsBytes = 48 << 10;  // score_grad_rows: a block's shared memory, at most
constexpr std::int64_t kTile = 1024;           // score_grad: experts of a row in shared memory

/// Returns the gradient of a slot's score: 0 for a slot without a row.
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

/// Gradients of scores that have a softmax of their own (over the top-K, or renormalised), with up
/// to kLanes entries a token:
///   dlogit_k = s_k (g_k - inner), inner = sum_k g_k s_k.
///
/// kLanes lanes hold a token's entries, so the loads of a warp's kWarp / kLanes tokens are in
/// flight together. The warp assembles the rows of those tokens in shared memory and writes them
/// whole, in pieces of 16 bytes; their size must be a multiple of that. kAdds: dlogits_in is added.
template <class T, int kLanes, bool kAdds>
__global__ void __launch_bounds__(kWarps* kWarp)
    score_grad_rows(SlotGradients gradient, const float* slot_scores,
                    const std::int32_t* slot_experts, const T* dlogits_in, T* dlogits,
                    std::int64_t tokens, std::int32_t experts, std::int32_t top_k) {
  constexpr int kTokens = kWarp / kLanes;
  constexpr int kPiece = 16 / sizeof(T);
  extern __shared__ uint4 rows[];  // (kWarps, kTokens, experts)
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t first_token = (std::int64_t{blockIdx.x} * kWarps + warp) * kTokens;
  const int pieces = kTokens * experts / kPiece;
  uint4* const mine = rows + warp * pieces;
  T* const values = reinterpret_cast<T*>(mine);
  if constexpr (!kAdds) {
#pragma unroll 2
    for (int i = lane_id(); i < pieces; i += kWarp) mine[i] = uint4{};
  }
  wait_for_previous();
  let_next_start();
  const int left = static_cast<int>(min(std::int64_t{kTokens}, tokens - first_token));
  const int token = lane_id() / kLanes;
  const int entry = lane_id() % kLanes;
  const bool has = entry < top_k && token < left;
  const std::int64_t at = (first_token + token) * top_k + entry;
  const float g = has ? gradient(at) : 0.0f;
  const float s = has ? slot_scores[at] : 0.0f;
  const std::int32_t e = has ? slot_experts[at] : -1;
  const int count = left * experts;  // below 0 past the last token
  const int whole = count / kPiece;
  if constexpr (kAdds) {
    const T* const from = dlogits_in + first_token * experts;
    const auto plus_zero = [](T x) { return from_float<T>(math::add(0.0f, to_float(x))); };
    for (int i = lane_id(); i < whole; i += kWarp) {
      const uint4 bits = reinterpret_cast<const uint4*>(from)[i];
      T outside[kPiece];
      memcpy(outside, &bits, sizeof bits);
#pragma unroll
      for (T& x : outside) x = plus_zero(x);
      memcpy(&mine[i], outside, sizeof bits);
    }
    for (int i = whole * kPiece + lane_id(); i < count; i += kWarp) values[i] = plus_zero(from[i]);
  }
  float inner = 0.0f;  // all lanes of a token make the same sum, in slot order
#pragma unroll
  for (int l = 0; l < kLanes; ++l) {
    const float g_l = __shfl_sync(kAllLanes, g, l, kLanes);
    const float s_l = __shfl_sync(kAllLanes, s, l, kLanes);
    if (l < top_k) inner = math::fma(g_l, s_l, inner);
  }
  __syncwarp();                 // all lanes have filled the rows before a lane writes its entry
  if (e >= 0 && e < experts) {  // a token's experts differ, so no two lanes write one value
    float outside = 0.0f;       // not from `values`, where adding zero has lost the sign of -0
    if constexpr (kAdds) outside = to_float(dlogits_in[(first_token + token) * experts + e]);
    const float d = math::mul(s, math::sub(g, inner));
    values[token * experts + e] = from_float<T>(math::add(d, outside));
  }
  __syncwarp();  // all lanes see the finished rows
  T* const to = dlogits + first_token * experts;
#pragma unroll 2
  for (int i = lane_id(); i < whole; i += kWarp) reinterpret_cast<uint4*>(to)[i] = mine[i];
  // The rows of the last tokens need not be whole pieces.
  for (int i = whole * kPiece + lane_id(); i < count; i += kWarp) to[i] = values[i];
}

/// Every other case, a token per warp. kAllExperts: the scores are probabilities p over all
/// experts, so every expert has a gradient:
///   dlogit_e = p_e (g_e - inner).
/// kRepeats: a token's entries may have the same expert, and add.
template <class T, bool kAllExperts, bool kRepeats>
__global__ void __launch_bounds__(kWarps* kWarp, 3)
    score_grad(SlotGradients gradient, const float* slot_scores, const std::int32_t* slot_experts,
               const T* logits, const T* dlogits_in, T* dlogits, std::int64_t tokens,
               std::int64_t experts, int top_k, int tile) {
  extern __shared__ float tiles[];  // (kWarps, tile)
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + warp;
  wait_for_previous();
  let_next_start();
  if (t >= tokens) return;
  float* const grad = tiles + warp * tile;

  // Lane k keeps entry k. K above kWarp is rare, so the other entries are loaded here for `inner`
  // and again below.
  const std::int64_t first = t * top_k;
  const bool has = lane_id() < top_k;
  const std::int32_t my_expert = has ? slot_experts[first + lane_id()] : 0;
  const float my_score = has ? slot_scores[first + lane_id()] : 0.0f;
  const float my_gradient = has ? gradient(first + lane_id()) : 0.0f;
  float inner = 0.0f;  // all lanes make the same sum, in slot order
  for (int k0 = 0; k0 < top_k; k0 += kWarp) {
    const int k = k0 + lane_id();
    const float g = k0 == 0 ? my_gradient : k < top_k ? gradient(first + k) : 0.0f;
    const float s = k0 == 0 ? my_score : k < top_k ? slot_scores[first + k] : 0.0f;
    const int left = min(kWarp, top_k - k0);
#pragma unroll 4
    for (int l = 0; l < left; ++l) {
      inner = math::fma(__shfl_sync(kAllLanes, g, l), __shfl_sync(kAllLanes, s, l), inner);
    }
  }
  RowSoftmax softmax{};
  if constexpr (kAllExperts) softmax = row_softmax(logits + t * experts, experts);

  for (std::int64_t e0 = 0; e0 < experts; e0 += tile) {
    const int n = static_cast<int>(min(std::int64_t{tile}, experts - e0));
    for (int e = lane_id(); e < n; e += kWarp) {
      grad[e] = 0.0f;
      if constexpr (kAllExperts) {
        grad[e] = math::mul(-softmax.probability(to_float(logits[t * experts + e0 + e])), inner);
      }
    }
    __syncwarp();
    for (int k = lane_id(); !kRepeats && k < top_k; k += kWarp) {  // a token's experts differ
      const std::int64_t e = (k < kWarp ? my_expert : slot_experts[first + k]) - e0;
      if (e < 0 || e >= n) continue;
      const float g = k < kWarp ? my_gradient : gradient(first + k);
      const float s = k < kWarp ? my_score : slot_scores[first + k];
      grad[e] =
          kAllExperts ? math::add(grad[e], math::mul(s, g)) : math::mul(s, math::sub(g, inner));
    }
    if constexpr (kRepeats) {
      for (int k0 = 0; k0 < top_k; k0 += kWarp) {
        const int k = k0 + lane_id();
        const bool mine = k < top_k;
        const std::int64_t e = mine ? slot_experts[first + k] - e0 : -1;
        const float g = mine ? gradient(first + k) : 0.0f;
        const float s = mine ? slot_scores[first + k] : 0.0f;
        const float part = math::mul(s, kAllExperts ? g : math::sub(g, inner));
        const int left = min(kWarp, top_k - k0);
        for (int l = 0; l < left; ++l) {  // in slot order, as src/cpu adds
          if (l == lane_id() && e >= 0 && e < n) grad[e] = math::add(grad[e], part);
          __syncwarp();  // the next lane sees the sum
        }
      }
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

/// Lanes for a token in score_grad_rows, or 0 if that kernel cannot take the descriptor. They are
/// the fewest that hold K entries, keep a block's rows within kRowsBytes, and make a warp's rows a
/// multiple of 16 bytes.
template <class T>
int lanes_of(const ScoreGradDesc& d) {
  if (d.reaches_all_experts() || d.takes_ids()) return 0;
  for (int lanes = 4; lanes <= 16; lanes *= 2) {
    const std::int64_t of_warp = kWarp / lanes * d.experts * static_cast<std::int64_t>(sizeof(T));
    if (d.top_k <= lanes && of_warp % 16 == 0 && kWarps * of_warp <= kRowsBytes) return lanes;
  }
  return 0;
}

template <class T, bool kAdds>
void start_rows(const ScoreGradDesc& d, const ScoreGradArgs& a, const Exec& exec, int lanes) {
  const std::int64_t together = kWarps * (kWarp / lanes);
  launch_early(lanes == 4   ? score_grad_rows<T, 4, kAdds>
               : lanes == 8 ? score_grad_rows<T, 8, kAdds>
                            : score_grad_rows<T, 16, kAdds>,
               blocks_for(d.tokens, together), kWarps * kWarp,
               static_cast<std::size_t>(together * d.experts) * sizeof(T), stream_of(exec),
               SlotGradients{a.row_dscores, a.slot_rows}, a.slot_scores, a.slot_experts,
               static_cast<const T*>(a.dlogits_in), static_cast<T*>(a.dlogits), d.tokens,
               static_cast<std::int32_t>(d.experts), static_cast<std::int32_t>(d.top_k));
}

template <class T>
Status run_typed(const ScoreGradDesc& d, const ScoreGradArgs& a, const Exec& exec) {
  if (const int lanes = lanes_of<T>(d); lanes > 0) {
    a.dlogits_in == nullptr ? start_rows<T, false>(d, a, exec, lanes)
                            : start_rows<T, true>(d, a, exec, lanes);
  } else {
    const int tile = static_cast<int>(std::min(d.experts, kTile));
    const bool all = d.reaches_all_experts();
    const auto once = all ? score_grad<T, true, false> : score_grad<T, false, false>;
    const auto repeats = all ? score_grad<T, true, true> : score_grad<T, false, true>;
    launch_early(d.takes_ids() ? repeats : once, blocks_for(d.tokens, kWarps), kWarps * kWarp,
                 4 * static_cast<std::size_t>(kWarps * tile), stream_of(exec),
                 SlotGradients{a.row_dscores, a.slot_rows}, a.slot_scores, a.slot_experts,
                 static_cast<const T*>(a.logits), static_cast<const T*>(a.dlogits_in),
                 static_cast<T*>(a.dlogits), d.tokens, d.experts, static_cast<int>(d.top_k), tile);
  }
  return launched("score_grad: launch");
}

Status run(const ScoreGradDesc& d, const ScoreGradArgs& a, void*, const Exec& exec) noexcept {
  if (!d.has_logits()) {
    if (d.rows == 0) return {};
    launch_early(to_slot_order, blocks_for(d.rows, 256), 256, 0, stream_of(exec),
                 SlotGradients{a.row_dscores, a.slot_rows}, d.rows, a.dscores);
    return launched("score_grad: launch");
  }
  if (d.tokens == 0) return {};
  return visit_logits(d.dtype, [&](auto type) { return run_typed<decltype(type)>(d, a, exec); });
}

}  // namespace

const Kernel<ScoreGradDesc> kScoreGrad = {
    .op = "score_grad",
    .name = "sm90.score_grad",
    .arch = 90,
    .dtypes = kLogitsTypes,
    .run = run,
};

}  // namespace sonicmoe::cuda
