// Takes the gradients of the scores, one a row. Without logits it puts them into slot order. With
// logits it takes them back through the router to dense dlogits, in one pass: sums over a token's K
// entries, softmax backward, and zeros. Where the router is not RouterDesc::plain(), a kernel
// before that pass takes them through scales and renormalisation.
#include <algorithm>

#include "core/backends.h"
#include "core/ledger.h"
#include "cuda/routing/routing.cuh"
#include "math/router_score.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 8;                      // of a block
constexpr std::int64_t kRowsBytes = 48 << 10;  // score_grad_rows: a block's shared memory, at most
constexpr std::int64_t kTile = 1024;           // score_grad: experts of a row in shared memory
constexpr int kEntryThreads = 128;             // of a block of scored_entries

/// Returns the gradient of a slot's score: 0 for a slot without a row. Without slot_rows
/// row_dscores is in slot order.
struct SlotGradients {
  const float* row_dscores;
  const std::int32_t* slot_rows;
  bool subtracts = true;  ///< the softmax subtracts the sum of gradients times scores
  __device__ float operator()(std::int64_t slot) const {
    if (slot_rows == nullptr) return row_dscores[slot];
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
  if (!gradient.subtracts) inner = 0.0f;
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
  if (!gradient.subtracts) inner = 0.0f;
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

/// What becomes of the gradients of scores before the pass over logits. kLanes lanes take a token.
/// Slot by slot: `gradients` and `factors` as RouterWeights says. In row order:
/// `scale_terms`, which add up to dexpert_scale, or null.
struct Entries {
  float* gradients;
  float* factors;
  float* scale_terms;
};
template <int kLanes>
__global__ void __launch_bounds__(kEntryThreads)
    scored_entries(SlotGradients gradient, const float* probabilities,
                   const std::int32_t* slot_experts, const float* expert_scale, RouterScore score,
                   math::RouterWeights weights, std::int64_t tokens, std::int64_t experts,
                   int top_k, Entries out) {
  const std::int64_t t = (std::int64_t{blockIdx.x} * kEntryThreads + threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first = t * top_k;
  wait_for_previous();
  let_next_start();
  float sum = 0.0f;  // sums in slot order, as src/cpu adds; all lanes of a token make them
  for (int k0 = 0; k0 < top_k; k0 += kLanes) {
    const int k = k0 + lane;
    const float p = t < tokens && k < top_k ? probabilities[first + k] : 0.0f;
#pragma unroll 8
    for (int l = 0; l < min(kLanes, top_k - k0); ++l) {
      sum = math::add(sum, __shfl_sync(kAllLanes, p, l, kLanes));
    }
  }
  const float divisor = weights.divisor(sum);
  float inner = 0.0f;
  for (int k0 = 0; k0 < top_k; k0 += kLanes) {
    const int k = k0 + lane;
    const std::int64_t slot = first + k;
    float h = 0.0f, w = 0.0f;
    if (t < tokens && k < top_k) {
      const std::int32_t e = slot_experts[slot];
      const bool scaled = expert_scale != nullptr && e >= 0 && e < experts;
      const float p = probabilities[slot];
      const float g = gradient(slot);
      w = weights.weight(p, divisor);
      h = weights.scaled(g, scaled ? expert_scale[e] : 1.0f);
      out.gradients[slot] = h;
      out.factors[slot] = weights.factor(math::router_slope(score, p), divisor);
      const std::int32_t row = gradient.slot_rows[slot];
      if (out.scale_terms != nullptr && row >= 0) {
        out.scale_terms[row] = math::mul(g, weights.scaled(w, 1.0f));
      }
    }
#pragma unroll 8
    for (int l = 0; l < min(kLanes, top_k - k0); ++l) {
      const float h_l = __shfl_sync(kAllLanes, h, l, kLanes);
      inner = math::fma(h_l, __shfl_sync(kAllLanes, w, l, kLanes), inner);
    }
  }
  for (int k = lane; t < tokens && k < top_k; k += kLanes) {
    const std::int64_t slot = first + k;
    out.gradients[slot] = weights.gradient(out.gradients[slot], inner, divisor);
  }
}

/// dexpert_scale[e] sums the terms of expert e's rows. A warp takes an expert: lanes add every 32nd
/// row, then each other.
__global__ void __launch_bounds__(kWarps* kWarp)
    sum_expert_scales(const float* terms, const std::int32_t* offsets, std::int64_t experts,
                      float* dexpert_scale) {
  const std::int64_t e = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  wait_for_previous();
  let_next_start();
  if (e >= experts) return;
  float sum = 0.0f;
  for (std::int64_t r = offsets[e] + lane_id(); r < offsets[e + 1]; r += kWarp) {
    sum = math::add(sum, terms[r]);
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) dexpert_scale[e] = sum;
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
void start_rows(const ScoreGradDesc& d, const ScoreGradArgs& a, SlotGradients gradients,
                const Exec& exec, int lanes) {
  const std::int64_t together = kWarps * (kWarp / lanes);
  launch_early(lanes == 4   ? score_grad_rows<T, 4, kAdds>
               : lanes == 8 ? score_grad_rows<T, 8, kAdds>
                            : score_grad_rows<T, 16, kAdds>,
               blocks_for(d.tokens, together), kWarps * kWarp,
               static_cast<std::size_t>(together * d.experts) * sizeof(T), exec, gradients,
               a.slot_scores, a.slot_experts, static_cast<const T*>(a.dlogits_in),
               static_cast<T*>(a.dlogits), d.tokens, static_cast<std::int32_t>(d.experts),
               static_cast<std::int32_t>(d.top_k));
}

template <class T>
Status run_typed(const ScoreGradDesc& d, const ScoreGradArgs& a, SlotGradients gradients,
                 const Exec& exec) {
  if (const int lanes = lanes_of<T>(d); lanes > 0) {
    a.dlogits_in == nullptr ? start_rows<T, false>(d, a, gradients, exec, lanes)
                            : start_rows<T, true>(d, a, gradients, exec, lanes);
  } else {
    const int tile = static_cast<int>(std::min(d.experts, kTile));
    const bool all = d.reaches_all_experts();
    const auto once = all ? score_grad<T, true, false> : score_grad<T, false, false>;
    const auto repeats = all ? score_grad<T, true, true> : score_grad<T, false, true>;
    launch_early(d.takes_ids() ? repeats : once, blocks_for(d.tokens, kWarps), kWarps * kWarp,
                 4 * static_cast<std::size_t>(kWarps * tile), exec, gradients, a.slot_scores,
                 a.slot_experts, static_cast<const T*>(a.logits),
                 static_cast<const T*>(a.dlogits_in), static_cast<T*>(a.dlogits), d.tokens,
                 d.experts, static_cast<int>(d.top_k), tile);
  }
  return launched("score_grad: launch");
}

struct Regions {
  std::size_t gradients, factors, scale_terms, bytes;
};
Regions regions(const ScoreGradDesc& d) {
  Ledger ledger;
  Regions r{};
  const std::size_t slots = d.keeps_probabilities() ? 4 * static_cast<std::size_t>(d.rows) : 0;
  r.gradients = ledger.book("gradients", slots);
  r.factors = ledger.book("factors", slots);
  r.scale_terms = ledger.book("scale_terms", d.expert_scale ? slots : 0);
  r.bytes = ledger.size();
  return r;
}

/// Starts what comes before the pass over logits, and puts its results into the pass's arguments.
void start_entries(const ScoreGradDesc& d, void* memory, const Exec& exec, ScoreGradArgs* a,
                   SlotGradients* gradients) {
  const Regions at = regions(d);
  const auto region = [&](std::size_t offset) {
    return reinterpret_cast<float*>(static_cast<char*>(memory) + offset);
  };
  const bool scales = d.expert_scale && a->dexpert_scale != nullptr;
  const Entries entries{region(at.gradients), region(at.factors),
                        scales ? region(at.scale_terms) : nullptr};
  const int lanes = d.top_k <= 4 ? 4 : d.top_k <= 8 ? 8 : kWarp;
  launch_early(lanes == 4   ? scored_entries<4>
               : lanes == 8 ? scored_entries<8>
                            : scored_entries<kWarp>,
               blocks_for(d.tokens, kEntryThreads / lanes), kEntryThreads, 0, exec, *gradients,
               a->slot_probabilities, a->slot_experts, d.expert_scale ? a->expert_scale : nullptr,
               d.score, math::RouterWeights{d.divides(), d.eps, d.scale}, d.tokens, d.experts,
               static_cast<int>(d.top_k), entries);
  if (scales) {
    launch_early(sum_expert_scales, blocks_for(d.experts, kWarps), kWarps * kWarp, 0, exec,
                 entries.scale_terms, a->offsets, d.experts, a->dexpert_scale);
  }
  a->slot_scores = entries.factors;
  *gradients = {entries.gradients, nullptr, d.over_top_k() || d.reaches_all_experts()};
}

std::size_t workspace(const ScoreGradDesc& d, const Exec&) { return regions(d).bytes; }

Status run(const ScoreGradDesc& d, const ScoreGradArgs& args, void* memory,
           const Exec& exec) noexcept {
  ScoreGradArgs a = args;
  SlotGradients gradients{a.row_dscores, a.slot_rows};
  if (!d.has_logits()) {
    if (d.rows == 0) return {};
    launch_early(to_slot_order, blocks_for(d.rows, 256), 256, 0, exec, gradients, d.rows,
                 a.dscores);
    return launched("score_grad: launch");
  }
  if (d.tokens == 0) {
    if (!d.expert_scale || a.dexpert_scale == nullptr) return {};
    const auto bytes = 4 * static_cast<std::size_t>(d.experts);
    return to_status(cudaMemsetAsync(a.dexpert_scale, 0, bytes, stream_of(exec)),
                     "score_grad: zeros");
  }
  if (d.keeps_probabilities()) start_entries(d, memory, exec, &a, &gradients);
  return visit_logits(d.dtype,
                      [&](auto type) { return run_typed<decltype(type)>(d, a, gradients, exec); });
}

}  // namespace

const Kernel<ScoreGradDesc> kScoreGrad = {
    .op = "score_grad",
    .name = "cuda.score_grad",
    .arch = 80,
    .and_later = true,
    .dtypes = kLogitsTypes,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cuda
