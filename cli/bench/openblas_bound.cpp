#include "openblas_bound.h"

#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "cli/tensors.h"

namespace sonicmoe::cli {
namespace {

/// An operand with `rows` rows an expert of its own (weights), or with the rows of all experts one
/// after the other (rows == 0).
struct Operand {
  float* data;
  std::int64_t rows;
  std::int64_t columns;

  float* of_expert(std::int64_t expert, std::int64_t first_row) const {
    return data + (rows > 0 ? expert * rows : first_row) * columns;
  }
};

/// C = op(A) op(B) for every expert.
struct EvenGemm {
  const char* name;
  Operand a, b, c;
  bool transpose_a, transpose_b;
};

}  // namespace

struct OpenblasBound::Data {
  Data(const LayerDesc& desc, std::int64_t row_count, int thread_count, std::uint64_t seed)
      : sizes(desc), threads(thread_count) {
    sizes.r = row_count;
    const Sizes& s = sizes;
    const auto random = [&](std::int64_t rows, std::int64_t columns) {
      return make_random(rows * columns, DType::f32, 0.02, seed++);
    };
    rows_d = random(s.r, s.d);
    rows_w = random(s.r, s.w);
    rows_n = random(s.r, s.n);
    w1 = random(s.e * s.w, s.d);
    w2 = random(s.e * s.d, s.n);
    rows_out = make_tensor(s.r * std::max({s.d, s.w, s.n}), DType::f32);
    if (!desc.experts.inference)
      weights_out = make_tensor(s.e * s.d * std::max(s.w, s.n), DType::f32);

    const auto rows_of = [](const Buffer& buffer, std::int64_t columns) {
      return Operand{buffer.as<float>(), 0, columns};
    };
    const Operand x = rows_of(rows_d, s.d), h = rows_of(rows_w, s.w), act = rows_of(rows_n, s.n);
    const Operand up = {w1.as<float>(), s.w, s.d}, down = {w2.as<float>(), s.d, s.n};
    float* rows_result = rows_out.as<float>();
    float* weights_result = weights_out.as<float>();
    // In the order of GemmOp.
    gemms = {{{"up_proj", x, up, {rows_result, 0, s.w}, false, true},
              {"down_proj", act, down, {rows_result, 0, s.d}, false, true},
              {"down_proj_dgrad", x, down, {rows_result, 0, s.n}, false, false},
              {"up_proj_dgrad", h, up, {rows_result, 0, s.d}, false, false},
              {"down_proj_wgrad", x, act, {weights_result, s.d, s.n}, true, false},
              {"up_proj_wgrad", h, x, {weights_result, s.w, s.d}, true, false}}};
  }

  double flops(const EvenGemm& gemm) const {
    const Operand& weights = gemm.transpose_a ? gemm.c : gemm.b;
    return 2.0 * static_cast<double>(sizes.r) * static_cast<double>(weights.rows) *
           static_cast<double>(weights.columns);
  }

  void run_expert(const EvenGemm& gemm, std::int64_t expert) const {
    // R rows over E experts as evenly as integers go.
    const std::int64_t first = expert * sizes.r / sizes.e;
    const std::int64_t count = (expert + 1) * sizes.r / sizes.e - first;
    const std::int64_t m = gemm.transpose_a ? gemm.a.columns : count;
    const std::int64_t inner = gemm.transpose_a ? count : gemm.a.columns;
    const std::int64_t n = gemm.c.columns;
    cblas_sgemm(CblasRowMajor, gemm.transpose_a ? CblasTrans : CblasNoTrans,
                gemm.transpose_b ? CblasTrans : CblasNoTrans, static_cast<blasint>(m),
                static_cast<blasint>(n), static_cast<blasint>(inner), 1.0F,
                gemm.a.of_expert(expert, first), static_cast<blasint>(gemm.a.columns),
                gemm.b.of_expert(expert, first), static_cast<blasint>(gemm.b.columns), 0.0F,
                gemm.c.of_expert(expert, first), static_cast<blasint>(n));
  }

  void run(const EvenGemm& gemm, bool experts_in_parallel) const {
    if (experts_in_parallel) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
      for (std::int64_t expert = 0; expert < sizes.e; ++expert) run_expert(gemm, expert);
    } else {
      for (std::int64_t expert = 0; expert < sizes.e; ++expert) run_expert(gemm, expert);
    }
  }

  Sizes sizes;
  int threads;
  Buffer rows_d, rows_w, rows_n, w1, w2, rows_out, weights_out;
  std::array<EvenGemm, 6> gemms;
};

OpenblasBound::OpenblasBound(const LayerDesc& desc, std::int64_t rows, int threads,
                             std::uint64_t seed)
    : data_(std::make_shared<Data>(desc, rows, threads, seed)) {
  title_ = "fp32 OpenBLAS, even experts";
  if (desc.experts.dtype != DType::f32) {
    title_ += " (there is no 2-byte OpenBLAS to bound this dtype with)";
  }
  candidates_.resize(desc.experts.inference ? 2 : 6);
  openblas_set_num_threads(1);
  for (const bool experts_in_parallel : {true, false}) {
    for (const bool backward : {false, true}) {
      if (backward && desc.experts.inference) continue;
      Group group;
      for (std::size_t i = backward ? 2 : 0; i < (backward ? 6 : 2); ++i) {
        const EvenGemm& gemm = data_->gemms[i];
        const auto run = [data = data_, &gemm, experts_in_parallel] {
          data->run(gemm, experts_in_parallel);
          return Status();
        };
        candidates_[i].push_back(
            {groups_.size(), group.tasks.size(),
             experts_in_parallel ? "experts in parallel" : "threads inside a GEMM"});
        group.tasks.push_back({.name = gemm.name, .run = run, .flops = data_->flops(gemm)});
      }
      if (!experts_in_parallel) {
        // OpenMP's idle threads spin for some milliseconds, OpenBLAS's for some tens. Neither may
        // take a core from the other's GEMMs.
        group.before = [threads] {
          openblas_set_num_threads(threads);
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        };
        group.after = [] {
          openblas_set_num_threads(1);
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
        };
      }
      groups_.push_back(std::move(group));
    }
  }
}

}  // namespace sonicmoe::cli
