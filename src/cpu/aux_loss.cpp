// Switch load-balancing loss E sum_e (P_e / sum P)(f_e / sum f), or its gradient to the logits. P_e
// is the sum of expert e's probabilities over the tokens, and f_e is counts[e].
#include "core/backends.h"
#include "cpu/routing.h"

namespace sonicmoe::cpu {
namespace {

// Probabilities are summed over each of kChunks chunks of tokens, then chunk by chunk. So the order
// is the same for any number of threads.
constexpr std::int64_t kChunks = 64;

struct Scratch {
  double* chunk_sums;  // (kChunks, E)
  double* prob_sums;   // (E): P
  float* rows;         // (threads, E)

  static std::size_t bytes(const AuxLossDesc& d, const Exec& exec) {
    const std::size_t experts = static_cast<std::size_t>(d.experts);
    return experts * (8 * (kChunks + 1) + 4 * static_cast<std::size_t>(exec.threads));
  }
  Scratch(const AuxLossDesc& d, void* memory)
      : chunk_sums(static_cast<double*>(memory)),
        prob_sums(chunk_sums + kChunks * d.experts),
        rows(reinterpret_cast<float*>(prob_sums + d.experts)) {}
};

/// Softmax of one token's logits.
template <class T>
void probabilities(const T* logits, std::int64_t experts, float* row) {
  softmax_row(load_row(logits, experts, row), experts, row);
}

template <class T>
void sum_probabilities(const AuxLossDesc& d, const T* logits, const Scratch& scratch, int threads) {
  const std::int64_t step = (d.tokens + kChunks - 1) / kChunks;
  parallel_for(threads, kChunks, [&](int thread, std::int64_t chunk) {
    double* sums = scratch.chunk_sums + chunk * d.experts;
    float* row = scratch.rows + thread * d.experts;
    std::fill_n(sums, d.experts, 0.0);
    const std::int64_t end = std::min(d.tokens, (chunk + 1) * step);
    for (std::int64_t t = chunk * step; t < end; ++t) {
      probabilities(logits + t * d.experts, d.experts, row);
      for (std::int64_t e = 0; e < d.experts; ++e) sums[e] += row[e];
    }
  });
  std::fill_n(scratch.prob_sums, d.experts, 0.0);
  for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
    for (std::int64_t e = 0; e < d.experts; ++e) {
      scratch.prob_sums[e] += scratch.chunk_sums[chunk * d.experts + e];
    }
  }
}

template <class T>
void run_typed(const AuxLossDesc& d, const AuxLossArgs& a, void* memory, const Exec& exec) {
  const T* logits = static_cast<const T*>(a.logits);
  const Scratch scratch(d, memory);
  double counted = 0.0;
  for (std::int64_t e = 0; e < d.experts; ++e) counted += a.counts[e];
  if (d.tokens == 0 || counted == 0.0) {
    if (!d.backward) *a.loss = 0.0f;
    if (d.backward) {
      std::fill_n(static_cast<T*>(a.dlogits), d.tokens * d.experts, from_float<T>(0.0f));
    }
    return;
  }
  sum_probabilities(d, logits, scratch, exec.threads);
  double total = 0.0;
  double weighted = 0.0;  // sum_e P_e f_e / sum f
  for (std::int64_t e = 0; e < d.experts; ++e) {
    total += scratch.prob_sums[e];
    weighted += scratch.prob_sums[e] * (a.counts[e] / counted);
  }
  const double experts = static_cast<double>(d.experts);
  if (!d.backward) {
    *a.loss = static_cast<float>(experts * weighted / total);
    return;
  }
  // dL/dP_e = E (f_e / sum f - weighted / total) / total, times dloss, overwrites P_e. The loop
  // over tokens then takes these slopes through each token's softmax.
  double* slope = scratch.prob_sums;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    slope[e] = *a.dloss * experts * (a.counts[e] / counted - weighted / total) / total;
  }
  parallel_ranges(exec.threads, d.tokens, kTokensPerPiece,
                  [&](int thread, std::int64_t begin, std::int64_t end) {
                    float* row = scratch.rows + thread * d.experts;
                    for (std::int64_t t = begin; t < end; ++t) {
                      probabilities(logits + t * d.experts, d.experts, row);
                      double inner = 0.0;
                      for (std::int64_t e = 0; e < d.experts; ++e) inner += row[e] * slope[e];
                      T* out = static_cast<T*>(a.dlogits) + t * d.experts;
                      for (std::int64_t e = 0; e < d.experts; ++e) {
                        out[e] = from_float<T>(static_cast<float>(row[e] * (slope[e] - inner)));
                      }
                    }
                  });
}

Status run(const AuxLossDesc& d, const AuxLossArgs& a, void* memory, const Exec& exec) noexcept {
  return visit_dtype(d.dtype, [&](auto type) {
    run_typed<decltype(type)>(d, a, memory, exec);
    return Status();
  });
}

}  // namespace

const Kernel<AuxLossDesc> kAuxLoss = {
    .op = "aux_loss",
    .name = "cpu.aux_loss",
    .dtypes = kStorageTypes,
    .workspace = Scratch::bytes,
    .run = run,
};

}  // namespace sonicmoe::cpu
