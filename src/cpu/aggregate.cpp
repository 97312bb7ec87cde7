// out[t] = sum over t's slots of score * rows[row of slot]
//        + sum over t's slots of dlogits[t, e] * router_w[e]
//        + addend[t]
//
// Each sum runs in slot order. Sums are fp32, rounded once. The pass gathers rows and is bound by
// memory bandwidth.
#include "core/backends.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"

namespace sonicmoe::cpu {
namespace {

constexpr std::int64_t kColumns = 1024;  // columns at a time; their fp32 sums lie on the stack

template <class T>
void add_row(const T* __restrict row, float score, bool weighted, std::int64_t n,
             float* __restrict sum) {
  if (weighted) {
    for (std::int64_t j = 0; j < n; ++j) sum[j] = math::fma(score, to_float(row[j]), sum[j]);
  } else {
    for (std::int64_t j = 0; j < n; ++j) sum[j] += to_float(row[j]);
  }
}

/// Adds the router's part of dX. D and W are the types of dlogits and router_w.
template <class D, class W>
void add_routers(const AggregateDesc& d, const AggregateArgs& a, std::int64_t t, std::int64_t j0,
                 std::int64_t n, float* sum) {
  float routers[kColumns];  // a separate sum, so that CPU and GPU give the same bits
  std::fill_n(routers, n, 0.0f);
  for (std::int64_t slot = t * d.top_k; slot < (t + 1) * d.top_k; ++slot) {
    const std::int64_t e = a.slot_experts[slot];
    if (e < 0 || e >= d.experts) continue;
    add_row(static_cast<const W*>(a.router_w) + e * d.hidden + j0,
            to_float(static_cast<const D*>(a.dlogits)[t * d.experts + e]), true, n, routers);
  }
  add_row(routers, 1.0f, false, n, sum);
}

template <class T>
void aggregate_token(const AggregateDesc& d, const AggregateArgs& a, std::int64_t t) {
  const bool lists = d.top_k == 0;
  const std::int64_t begin = lists ? a.token_offsets[t] : t * d.top_k;
  const std::int64_t end = lists ? a.token_offsets[t + 1] : begin + d.top_k;
  for (std::int64_t j0 = 0; j0 < d.hidden; j0 += kColumns) {
    const std::int64_t n = std::min(kColumns, d.hidden - j0);
    float sum[kColumns];
    std::fill_n(sum, n, 0.0f);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t slot = lists && a.token_slots != nullptr ? a.token_slots[i] : i;
      const std::int64_t row = a.slot_rows[slot];
      if (row < 0) continue;
      const bool weighted = a.slot_scores != nullptr;
      add_row(static_cast<const T*>(a.rows) + row * d.hidden + j0,
              weighted ? a.slot_scores[slot] : 1.0f, weighted, n, sum);
    }
    if (a.router_w != nullptr) {
      d.f32_router_w  ? add_routers<float, float>(d, a, t, j0, n, sum)
      : d.f32_dlogits ? add_routers<float, T>(d, a, t, j0, n, sum)
                      : add_routers<T, T>(d, a, t, j0, n, sum);
    }
    if (a.addend != nullptr) {
      add_row(static_cast<const T*>(a.addend) + t * d.hidden + j0, 1.0f, false, n, sum);
    }
    T* out = static_cast<T*>(a.out) + t * d.hidden + j0;
    for (std::int64_t j = 0; j < n; ++j) out[j] = from_float<T>(sum[j]);
  }
}

Status run(const AggregateDesc& d, const AggregateArgs& a, void*, const Exec& exec) noexcept {
  return visit_dtype(d.dtype, [&](auto type) {
    parallel_ranges(exec.threads, d.tokens, kTokensPerPiece,
                    [&](int, std::int64_t begin, std::int64_t end) {
                      for (std::int64_t t = begin; t < end; ++t) {
                        aggregate_token<decltype(type)>(d, a, t);
                      }
                    });
    return Status();
  });
}

}  // namespace

const Kernel<AggregateDesc> kAggregate = {
    .op = "aggregate",
    .name = "cpu.aggregate",
    .dtypes = kStorageTypes,
    .run = run,
};

}  // namespace sonicmoe::cpu
