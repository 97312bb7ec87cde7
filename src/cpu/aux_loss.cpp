// Losses on a router's logits and their gradients; AuxLossArgs has the formulas. P_e sums expert
// e's share q of each token's scores over a sequence, and f_e is its count there.
#include "core/backends.h"
#include "cpu/routing.h"
#include "math/router_score.h"

namespace sonicmoe::cpu {
namespace {

// Sums over tokens are made in chunks, about kChunks in all, and then chunk by chunk. Sizes alone
// say which, so the order is the same for any number of threads.
constexpr std::int64_t kChunks = 64;

/// A part of a mean: a sum, and how many things it sums.
struct Term {
  double sum = 0.0;
  double count = 0.0;
};

/// Where sequences and their chunks of tokens begin and end.
struct Split {
  std::int64_t sequence;  // tokens of a sequence
  std::int64_t parts;     // chunks of a sequence
  std::int64_t step;      // tokens of a chunk

  explicit Split(const AuxLossDesc& d)
      : sequence(d.tokens / d.sequences),
        parts(std::max<std::int64_t>(1, kChunks / d.sequences)),
        step((sequence + parts - 1) / parts) {}
  std::int64_t begin(std::int64_t chunk) const {
    return chunk / parts * sequence + std::min(sequence, chunk % parts * step);
  }
  std::int64_t end(std::int64_t chunk) const {
    return chunk / parts * sequence + std::min(sequence, (chunk % parts + 1) * step);
  }
};

struct Scratch {
  Term* terms;   // balance: (B), of sequences; z: (kChunks), of chunks of tokens
  double* sums;  // balance: (B, parts, E). The first part becomes P, and for backward dL/dP
  float* rows;   // (threads, E)

  static std::int64_t term_count(const AuxLossDesc& d) {
    return d.loss == RouterLoss::balance ? d.sequences : kChunks;
  }
  static std::int64_t sum_count(const AuxLossDesc& d) {
    return d.loss == RouterLoss::balance ? d.sequences * Split(d).parts * d.experts : 0;
  }
  static std::size_t bytes(const AuxLossDesc& d, const Exec& exec) {
    return sizeof(Term) * static_cast<std::size_t>(term_count(d)) +
           sizeof(double) * static_cast<std::size_t>(sum_count(d)) +
           sizeof(float) * static_cast<std::size_t>(d.experts * exec.threads);
  }
  Scratch(const AuxLossDesc& d, void* memory)
      : terms(static_cast<Term*>(memory)),
        sums(reinterpret_cast<double*>(terms + term_count(d))),
        rows(reinterpret_cast<float*>(sums + sum_count(d))) {}
};

bool counts(const AuxLossDesc& d, const AuxLossArgs& a, std::int64_t t) {
  return !d.masked || a.token_mask[t] != 0;
}

/// The mean, or for backward what it multiplies the gradients of its parts with: dloss / count.
/// Both are 0 where nothing counts.
double mean(const AuxLossDesc& d, const AuxLossArgs& a, const Scratch& s) {
  Term all;
  for (std::int64_t i = 0; i < Scratch::term_count(d); ++i) {
    all.sum += s.terms[i].sum;
    all.count += s.terms[i].count;
  }
  if (all.count == 0.0) return 0.0;
  return (d.backward ? *a.dloss : all.sum) / all.count;
}

template <class T>
void put_zeros(std::int64_t experts, T* out) {
  std::fill_n(out, experts, from_float<T>(0.0f));
}

/// Writes a token's scores p and returns what makes them shares: q = p * scale. That is 0 where all
/// scores are 0.
template <class T>
double score_row(const AuxLossDesc& d, const T* logits, float* row) {
  if (d.score == RouterScore::softmax) {
    softmax_row(load_row(logits, d.experts, row), d.experts, row);
    return 1.0;
  }
  for (std::int64_t e = 0; e < d.experts; ++e) {
    row[e] = math::router_score(d.score, to_float(logits[e]));
  }
  const float sum = math::lane_sum32(static_cast<int>(d.experts), [&](int e) { return row[e]; });
  return sum == 0.0f ? 0.0 : 1.0 / sum;
}

template <class T>
void sum_shares(const AuxLossDesc& d, const AuxLossArgs& a, const Scratch& s, int threads) {
  const T* logits = static_cast<const T*>(a.logits);
  const Split split(d);
  parallel_for(threads, d.sequences * split.parts, [&](int thread, std::int64_t chunk) {
    double* sums = s.sums + chunk * d.experts;
    float* row = s.rows + thread * d.experts;
    std::fill_n(sums, d.experts, 0.0);
    const std::int64_t end = split.end(chunk);
    for (std::int64_t t = split.begin(chunk); t < end; ++t) {
      if (!counts(d, a, t)) continue;
      const double scale = score_row(d, logits + t * d.experts, row);
      for (std::int64_t e = 0; e < d.experts; ++e) sums[e] += row[e] * scale;
    }
  });
}

/// Adds up a sequence's parts. Writes its term and, for backward, replaces P_e by dL/dP_e:
///   E (f_e / sum f - weighted / total) / total,
/// with weighted = sum_e P_e f_e / sum f and total = sum_e P_e. Without counts or shares there is
/// nothing to balance, and the mean leaves the sequence out.
void finish_sequence(const AuxLossDesc& d, const AuxLossArgs& a, const Scratch& s,
                     std::int64_t parts, std::int64_t b) {
  double* const p = s.sums + b * parts * d.experts;
  const std::int32_t* const f = a.counts + b * d.experts;
  for (std::int64_t part = 1; part < parts; ++part) {
    for (std::int64_t e = 0; e < d.experts; ++e) p[e] += p[part * d.experts + e];
  }
  double counted = 0.0;
  double total = 0.0;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    counted += f[e];
    total += p[e];
  }
  s.terms[b] = {};
  if (counted == 0.0 || total == 0.0) return;
  double weighted = 0.0;
  for (std::int64_t e = 0; e < d.experts; ++e) weighted += p[e] * (f[e] / counted);
  const double experts = static_cast<double>(d.experts);
  s.terms[b] = {experts * weighted / total, 1.0};
  if (!d.backward) return;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    p[e] = experts * (f[e] / counted - weighted / total) / total;
  }
}

/// Takes a sequence's slopes through a token's scores. A softmax gives q_e (slope_e - inner), with
/// inner = sum_j q_j slope_j; another score dp_e/dz_e (slope_e - inner) / sum p.
template <class T>
void balance_gradient(const AuxLossDesc& d, const T* logits, const double* slope, double factor,
                      float* row, T* out) {
  const double scale = score_row(d, logits, row);
  double inner = 0.0;
  for (std::int64_t e = 0; e < d.experts; ++e) inner += row[e] * slope[e];
  inner *= scale;
  if (d.score != RouterScore::softmax) {
    for (std::int64_t e = 0; e < d.experts; ++e) row[e] = math::router_slope(d.score, row[e]);
  }
  factor *= scale;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    out[e] = from_float<T>(static_cast<float>(row[e] * factor * (slope[e] - inner)));
  }
}

template <class T>
void run_balance(const AuxLossDesc& d, const AuxLossArgs& a, const Scratch& s, int threads) {
  const Split split(d);
  sum_shares<T>(d, a, s, threads);
  parallel_for(threads, d.sequences,
               [&](int, std::int64_t b) { finish_sequence(d, a, s, split.parts, b); });
  const double factor = mean(d, a, s);
  if (!d.backward) {
    *a.loss = static_cast<float>(factor);
    return;
  }
  parallel_ranges(threads, d.tokens, kTokensPerPiece,
                  [&](int thread, std::int64_t begin, std::int64_t end) {
                    float* row = s.rows + thread * d.experts;
                    for (std::int64_t t = begin; t < end; ++t) {
                      const std::int64_t b = t / split.sequence;
                      T* out = static_cast<T*>(a.dlogits) + t * d.experts;
                      if (s.terms[b].count == 0.0 || !counts(d, a, t)) {
                        put_zeros(d.experts, out);
                        continue;
                      }
                      balance_gradient(d, static_cast<const T*>(a.logits) + t * d.experts,
                                       s.sums + b * split.parts * d.experts, factor, row, out);
                    }
                  });
}

struct RowLse {
  float max;
  float sum;  // of e^(z - max)
  double value() const { return max + std::log(static_cast<double>(sum)); }
};

/// Writes e^(z - max) of a token's logits.
template <class T>
RowLse lse_row(const T* logits, std::int64_t experts, float* row) {
  const float max = load_row(logits, experts, row);
  const int count = static_cast<int>(experts);
  for (int e = 0; e < count; ++e) row[e] = math::softmax_term(row[e], max);
  return {max, math::lane_sum32(count, [&](int e) { return row[e]; })};
}

/// Sums lse^2 over the tokens of each chunk; backward only counts them.
template <class T>
void sum_squares(const AuxLossDesc& d, const AuxLossArgs& a, const Scratch& s, int threads) {
  const Split split(d);
  parallel_for(threads, kChunks, [&](int thread, std::int64_t chunk) {
    float* row = s.rows + thread * d.experts;
    Term term;
    const std::int64_t end = split.end(chunk);
    for (std::int64_t t = split.begin(chunk); t < end; ++t) {
      if (!counts(d, a, t)) continue;
      term.count += 1.0;
      if (d.backward) continue;
      const T* logits = static_cast<const T*>(a.logits) + t * d.experts;
      const double lse = lse_row(logits, d.experts, row).value();
      term.sum += lse * lse;
    }
    s.terms[chunk] = term;
  });
}

/// dlogit_e = 2 lse e^(z_e - lse), times dloss over the number of tokens.
template <class T>
void run_z(const AuxLossDesc& d, const AuxLossArgs& a, const Scratch& s, int threads) {
  sum_squares<T>(d, a, s, threads);
  const double factor = mean(d, a, s);
  if (!d.backward) {
    *a.loss = static_cast<float>(factor);
    return;
  }
  parallel_ranges(threads, d.tokens, kTokensPerPiece,
                  [&](int thread, std::int64_t begin, std::int64_t end) {
                    float* row = s.rows + thread * d.experts;
                    for (std::int64_t t = begin; t < end; ++t) {
                      T* out = static_cast<T*>(a.dlogits) + t * d.experts;
                      if (!counts(d, a, t)) {
                        put_zeros(d.experts, out);
                        continue;
                      }
                      const RowLse lse =
                          lse_row(static_cast<const T*>(a.logits) + t * d.experts, d.experts, row);
                      const double scale = factor * 2.0 * lse.value() / lse.sum;
                      for (std::int64_t e = 0; e < d.experts; ++e) {
                        out[e] = from_float<T>(static_cast<float>(scale * row[e]));
                      }
                    }
                  });
}

Status run(const AuxLossDesc& d, const AuxLossArgs& a, void* memory, const Exec& exec) noexcept {
  const Scratch scratch(d, memory);
  return visit_dtype(d.dtype, [&](auto type) {
    if (d.loss == RouterLoss::balance) {
      run_balance<decltype(type)>(d, a, scratch, exec.threads);
    } else {
      run_z<decltype(type)>(d, a, scratch, exec.threads);
    }
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
