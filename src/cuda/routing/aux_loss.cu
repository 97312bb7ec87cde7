// Losses on a router's logits and their gradients; AuxLossArgs has the formulas. P_e sums expert
// e's share q of each token's scores over a sequence, and f_e is its count there. Sums over tokens
// are fp64. Sizes alone fix their order: a warp adds its tokens, a block its warps, and
// sum_stretches the blocks.
#include <algorithm>

#include "core/backends.h"
#include "cuda/routing/routing.cuh"
#include "math/router_score.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kOneBlock = kWarp * kWarp;  // threads of the kernels that block_sum() serves
constexpr std::int64_t kMaxBlocks = 256;  // stretches of tokens, at most, in few sequences

/// A part of a mean: a sum, and how many things it sums.
struct Term {
  double sum;
  double count;
};

/// What the kernels read. Sequence b has the `sequence` tokens from b * sequence on.
template <class T>
struct Input {
  const T* logits;
  const std::uint8_t* mask;  // or null
  std::int64_t tokens;
  std::int64_t experts;
  std::int64_t sequence;
  RouterScore score;

  __device__ bool counts(std::int64_t t) const { return mask == nullptr || mask[t] != 0; }
};

/// A token's shares are q = p(z) * scale. slope() is what a gradient of q, less its mean, is
/// multiplied with beside the scale on its way to the logit. One warp makes a row.
struct SoftmaxRow {
  RowSoftmax row;
  static constexpr double scale = 1.0;
  // On a multiprocessor: registers, without a spill.
  static constexpr int kGradientBlocks = kArch > 90 ? 6 : 8;

  template <class T>
  __device__ SoftmaxRow(const T* logits, std::int64_t experts, RouterScore)
      : row(row_softmax(logits, experts)) {}
  __device__ float p(float z) const { return row.probability(z); }
  __device__ float slope(float p) const { return p; }
};
/// Scores that need a sum only to become shares. Where all are 0, so is the scale.
struct ScoreRow {
  RouterScore score;
  double scale;
  static constexpr int kGradientBlocks = 6;

  template <class T>
  __device__ ScoreRow(const T* logits, std::int64_t experts, RouterScore kind) : score(kind) {
    float sum = 0.0f;
    for (std::int64_t e = lane_id(); e < experts; e += kWarp) {
      sum = math::add(sum, p(to_float(logits[e])));
    }
    sum = warp_sum(sum);
    scale = sum == 0.0f ? 0.0 : 1.0 / sum;
  }
  __device__ float p(float z) const { return math::router_score(score, z); }
  __device__ float slope(float p) const { return math::router_slope(score, p); }
};

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

/// Sum over a block of kOneBlock threads. All of them call it and get the sum.
__device__ double block_sum(double x) {
  __shared__ double of_warp[kWarp];
  x = warp_sum(x);
  __syncthreads();  // every thread has read of_warp of the call before
  if (lane_id() == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();  // of_warp is complete
  return warp_sum(of_warp[lane_id()]);
}

/// partial[x][e] = sum of the shares of expert e over stretch x; each sequence has `parts`
/// stretches. Block (x, y) takes the y-th kWarp * kPerLane experts.
template <class T, int kPerLane, class Row>
__global__ void __launch_bounds__(kThreads, kPerLane != 4  ? 2
                                            : kArch >= 120 ? 4
                                                           : 6)
    sum_shares(Input<T> in, std::int64_t parts, std::int64_t stretch, double* partial) {
  __shared__ double sums[kWarp * kPerLane];
  const std::int64_t experts = in.experts;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t first = std::int64_t{blockIdx.y} * kWarp * kPerLane + lane_id();
  const std::int64_t b = blockIdx.x / static_cast<unsigned>(parts);
  const std::int64_t begin = b * in.sequence + (blockIdx.x - b * parts) * stretch;
  const std::int64_t end = min(begin + stretch, (b + 1) * in.sequence);
  const int left = static_cast<int>(experts - first);
  double sum[kPerLane] = {};
  for (std::int64_t t = begin + warp; t < end; t += kWarps) {
    if (!in.counts(t)) continue;
    const T* logits = in.logits + t * experts;
    const Row row(logits, experts, in.score);
    logits += first;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (j * kWarp < left) sum[j] += row.p(to_float(logits[j * kWarp])) * row.scale;
    }
  }
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int at = j * kWarp + lane_id();
        sums[at] = w == 0 ? sum[j] : sums[at] + sum[j];
      }
    }
    __syncthreads();  // warp w's part is added before the next warp's
  }
  for (int at = threadIdx.x; at < kWarp * kPerLane; at += kThreads) {
    const std::int64_t e = first - lane_id() + at;
    if (e < experts) partial[blockIdx.x * experts + e] = sums[at];
  }
}

/// sums[b][e] = sum of partial[x][e] over the stretches x of sequence b, blockIdx.y. A block takes
/// kWarp experts.
__global__ void __launch_bounds__(kOneBlock)
    sum_stretches(const double* partial, std::int64_t parts, std::int64_t experts, double* sums) {
  __shared__ double tile[kWarp][kWarp + 1];
  const std::int64_t b = blockIdx.y;
  const std::int64_t e = std::int64_t{blockIdx.x} * kWarp + threadIdx.x;
  double sum = 0.0;
  for (std::int64_t x = threadIdx.y; x < parts && e < experts; x += kWarp) {
    sum += partial[(b * parts + x) * experts + e];
  }
  tile[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();                                 // tile[][] is complete
  sum = warp_sum(tile[threadIdx.x][threadIdx.y]);  // warp y sums column y, an expert
  const std::int64_t summed = std::int64_t{blockIdx.x} * kWarp + threadIdx.y;
  if (threadIdx.x == 0 && summed < experts) sums[b * experts + summed] = sum;
}

/// Where a mean goes. Without dloss: the loss. With dloss (backward): the factor of the gradients,
/// dloss / count. Both are 0 where nothing counts. One thread calls put().
struct Mean {
  const float* dloss;
  float* loss;
  double* factor;

  __device__ void put(double sum, double count) const {
    const bool backward = dloss != nullptr;
    const double mean = count == 0.0 ? 0.0 : (backward ? *dloss : sum) / count;
    if (backward) {
      *factor = mean;
    } else {
      *loss = static_cast<float>(mean);
    }
  }
};

/// Block b writes the term of sequence b. Backward: it also replaces P_e in `sums` by the slope
/// dL/dP_e,
///   E (f_e / sum f - weighted / total) / total,
/// with weighted = sum_e P_e f_e / sum f and total = sum_e P_e. Without counts or shares there is
/// nothing to balance, and the mean leaves the sequence out. One sequence makes the mean here.
__global__ void __launch_bounds__(kOneBlock)
    finish_sequence(double* sums, const std::int32_t* counts, std::int64_t experts, Term* terms,
                    Mean mean) {
  double* const p = sums + blockIdx.x * experts;
  const std::int32_t* const f = counts + blockIdx.x * experts;
  double counted = 0.0;
  double total = 0.0;
  for (std::int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    counted += f[e];
    total += p[e];
  }
  counted = block_sum(counted);
  total = block_sum(total);
  const bool empty = counted == 0.0 || total == 0.0;
  double weighted = 0.0;
  for (std::int64_t e = threadIdx.x; e < experts && !empty; e += blockDim.x) {
    weighted += p[e] * (f[e] / counted);
  }
  weighted = block_sum(weighted);
  const double scale = static_cast<double>(experts);
  if (threadIdx.x == 0) {
    const Term term = empty ? Term{0.0, 0.0} : Term{scale * weighted / total, 1.0};
    terms[blockIdx.x] = term;
    if (gridDim.x == 1) mean.put(term.sum, term.count);
  }
  if (mean.dloss == nullptr || empty) return;
  for (std::int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    p[e] = scale * (f[e] / counted - weighted / total) / total;
  }
}

__global__ void __launch_bounds__(kOneBlock)
    mean_of_terms(const Term* terms, std::int64_t n, Mean mean) {
  double sum = 0.0;
  double count = 0.0;
  for (std::int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    sum += terms[i].sum;
    count += terms[i].count;
  }
  sum = block_sum(sum);
  count = block_sum(count);
  if (threadIdx.x == 0) mean.put(sum, count);
}

template <class T>
__device__ void put_zeros(std::int64_t experts, T* out) {
  for (std::int64_t e = lane_id(); e < experts; e += kWarp) out[e] = from_float<T>(0.0f);
}

/// dlogit_e = factor slope(p_e) scale (slope_e - sum_j q_j slope_j). A warp takes a token.
template <class T, class Row>
__global__ void __launch_bounds__(kThreads, Row::kGradientBlocks)
    balance_gradients(Input<T> in, const double* slopes, const Term* terms, const double* factor,
                      T* dlogits) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (t >= in.tokens) return;
  const std::int64_t experts = in.experts;
  // Fewer than 2^31 tokens: a division of 32 bits.
  const std::int64_t b = static_cast<unsigned>(t) / static_cast<unsigned>(in.sequence);
  T* const out = dlogits + t * experts;
  if (terms[b].count == 0.0 || !in.counts(t)) return put_zeros(experts, out);
  const T* const logits = in.logits + t * experts;
  const double* const slope = slopes + b * experts;
  const Row row(logits, experts, in.score);
  double inner = 0.0;
  for (std::int64_t e = lane_id(); e < experts; e += kWarp) {
    inner += row.p(to_float(logits[e])) * slope[e];
  }
  inner = warp_sum(inner) * row.scale;
  const double scale = *factor * row.scale;
  for (std::int64_t e = lane_id(); e < experts; e += kWarp) {
    const double s = row.slope(row.p(to_float(logits[e])));
    out[e] = from_float<T>(static_cast<float>(s * scale * (slope[e] - inner)));
  }
}

/// log of the sum of e^z over a row.
__device__ double log_sum(const RowSoftmax& row) {
  return row.max + log(static_cast<double>(row.sum));
}

/// terms[x]: the sum of lse^2 over stretch x of the tokens, and how many of them count.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_squares(Input<T> in, std::int64_t stretch, Term* terms) {
  __shared__ Term of_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t begin = blockIdx.x * stretch;
  const std::int64_t end = min(begin + stretch, in.tokens);
  Term term{0.0, 0.0};
  for (std::int64_t t = begin + warp; t < end; t += kWarps) {
    if (!in.counts(t)) continue;
    const double lse = log_sum(row_softmax(in.logits + t * in.experts, in.experts));
    term.sum += lse * lse;
    term.count += 1.0;
  }
  if (lane_id() == 0) of_warp[warp] = term;
  __syncthreads();  // of_warp is complete
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    term.sum += of_warp[w].sum;
    term.count += of_warp[w].count;
  }
  terms[blockIdx.x] = term;
}

/// The same without the sums, for backward.
__global__ void __launch_bounds__(kOneBlock)
    count_tokens(const std::uint8_t* mask, std::int64_t tokens, std::int64_t stretch, Term* terms) {
  const std::int64_t begin = blockIdx.x * stretch;
  const std::int64_t end = min(begin + stretch, tokens);
  double count = 0.0;
  for (std::int64_t t = begin + threadIdx.x; t < end; t += kOneBlock) {
    count += mask == nullptr || mask[t] != 0 ? 1.0 : 0.0;
  }
  count = block_sum(count);
  if (threadIdx.x == 0) terms[blockIdx.x] = {0.0, count};
}

/// dlogit_e = factor 2 lse e^(z_e - lse). A warp takes a token.
template <class T>
__global__ void __launch_bounds__(kThreads)
    z_gradients(Input<T> in, const double* factor, T* dlogits) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (t >= in.tokens) return;
  T* const out = dlogits + t * in.experts;
  if (!in.counts(t)) return put_zeros(in.experts, out);
  const T* const logits = in.logits + t * in.experts;
  const RowSoftmax row = row_softmax(logits, in.experts);
  const double scale = *factor * 2.0 * log_sum(row) / row.sum;
  for (std::int64_t e = lane_id(); e < in.experts; e += kWarp) {
    out[e] = from_float<T>(static_cast<float>(scale * row.term(to_float(logits[e]))));
  }
}

/// The stretches of tokens that a sequence is divided into.
struct Split {
  std::int64_t sequence;  // tokens of a sequence
  std::int64_t parts;     // stretches of a sequence
  std::int64_t stretch;   // tokens of a stretch

  explicit Split(const AuxLossDesc& d)
      : sequence(d.tokens / d.sequences),
        parts(std::clamp<std::int64_t>((sequence + kWarps - 1) / kWarps, 1,
                                       std::max<std::int64_t>(1, kMaxBlocks / d.sequences))),
        stretch((sequence + parts - 1) / parts) {}
};

/// The workspace.
struct Scratch {
  double* factor;   // (1): Mean
  Term* terms;      // balance: (B), of sequences; z: (parts), of stretches
  double* sums;     // balance: (B, E): P, and for backward the slopes
  double* partial;  // balance: (B, parts, E): P of the stretches; `sums` if parts is 1

  static constexpr std::size_t kTermsAt = 16;
  static std::int64_t term_count(const AuxLossDesc& d) {
    return d.loss == RouterLoss::balance ? d.sequences : Split(d).parts;
  }
  static std::size_t bytes(const AuxLossDesc& d, const Exec&) {
    const std::size_t terms = kTermsAt + sizeof(Term) * static_cast<std::size_t>(term_count(d));
    if (d.loss != RouterLoss::balance) return terms;
    const std::int64_t parts = Split(d).parts;
    const std::int64_t rows = d.sequences * (parts == 1 ? 1 : 1 + parts);
    return terms + sizeof(double) * static_cast<std::size_t>(rows * d.experts);
  }
  Scratch(const AuxLossDesc& d, void* memory)
      : factor(static_cast<double*>(memory)),
        terms(reinterpret_cast<Term*>(static_cast<char*>(memory) + kTermsAt)),
        sums(reinterpret_cast<double*>(terms + term_count(d))),
        partial(Split(d).parts == 1 ? sums : sums + d.sequences * d.experts) {}
};

template <class Row, class T>
void run_balance(const AuxLossDesc& d, const AuxLossArgs& a, const Input<T>& in, const Scratch& s,
                 const Mean& mean, cudaStream_t stream) {
  const Split split(d);
  const int per_lane = d.experts <= 128 ? 4 : 32;
  const auto sum = per_lane == 4 ? sum_shares<T, 4, Row> : sum_shares<T, 32, Row>;
  const dim3 grid(static_cast<unsigned>(d.sequences * split.parts),
                  blocks_for(d.experts, per_lane * kWarp));
  sum<<<grid, kThreads, 0, stream>>>(in, split.parts, split.stretch, s.partial);
  if (split.parts > 1) {
    const dim3 blocks(blocks_for(d.experts, kWarp), static_cast<unsigned>(d.sequences));
    sum_stretches<<<blocks, dim3(kWarp, kWarp), 0, stream>>>(s.partial, split.parts, d.experts,
                                                             s.sums);
  }
  finish_sequence<<<static_cast<unsigned>(d.sequences), kOneBlock, 0, stream>>>(
      s.sums, a.counts, d.experts, s.terms, mean);
  if (d.sequences > 1) mean_of_terms<<<1, kOneBlock, 0, stream>>>(s.terms, d.sequences, mean);
  if (d.backward && d.tokens > 0) {
    balance_gradients<T, Row><<<blocks_for(d.tokens, kWarps), kThreads, 0, stream>>>(
        in, s.sums, s.terms, s.factor, static_cast<T*>(a.dlogits));
  }
}

template <class T>
void run_z(const AuxLossDesc& d, const AuxLossArgs& a, const Input<T>& in, const Scratch& s,
           const Mean& mean, cudaStream_t stream) {
  const Split split(d);
  const auto blocks = static_cast<unsigned>(split.parts);
  if (d.backward) {
    count_tokens<<<blocks, kOneBlock, 0, stream>>>(in.mask, d.tokens, split.stretch, s.terms);
  } else {
    sum_squares<T><<<blocks, kThreads, 0, stream>>>(in, split.stretch, s.terms);
  }
  mean_of_terms<<<1, kOneBlock, 0, stream>>>(s.terms, split.parts, mean);
  if (d.backward && d.tokens > 0) {
    z_gradients<T><<<blocks_for(d.tokens, kWarps), kThreads, 0, stream>>>(
        in, s.factor, static_cast<T*>(a.dlogits));
  }
}

template <class T>
Status run_typed(const AuxLossDesc& d, const AuxLossArgs& a, void* memory, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const Scratch scratch(d, memory);
  const Input<T> in{.logits = static_cast<const T*>(a.logits),
                    .mask = d.masked ? a.token_mask : nullptr,
                    .tokens = d.tokens,
                    .experts = d.experts,
                    .sequence = Split(d).sequence,
                    .score = d.score};
  const Mean mean{d.backward ? a.dloss : nullptr, a.loss, scratch.factor};
  if (d.loss == RouterLoss::z) {
    run_z(d, a, in, scratch, mean, stream);
  } else if (d.score == RouterScore::softmax) {
    run_balance<SoftmaxRow>(d, a, in, scratch, mean, stream);
  } else {
    run_balance<ScoreRow>(d, a, in, scratch, mean, stream);
  }
  return launched("aux_loss: launch");
}

Status run(const AuxLossDesc& d, const AuxLossArgs& a, void* memory, const Exec& exec) noexcept {
  return visit_logits(d.dtype,
                      [&](auto type) { return run_typed<decltype(type)>(d, a, memory, exec); });
}

}  // namespace

const Kernel<AuxLossDesc> kAuxLoss = {
    .op = "aux_loss",
    .name = "cuda.aux_loss",
    .arch = 80,
    .and_later = true,
    .dtypes = kLogitsTypes,
    .workspace = Scratch::bytes,
    .run = run,
};

}  // namespace sonicmoe::cuda
