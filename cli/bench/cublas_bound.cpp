#include "cublas_bound.h"

#if SONICMOE_HAS_CUBLAS
#include <cublasLt.h>
#include <cublas_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>

#include "cli/tensors.h"
#include "device_clock.h"

namespace sonicmoe::cli {
namespace {

constexpr std::size_t kWorkspace = std::size_t{64} << 20;
constexpr int kProposals = 8;

/// cuBLAS of the CUDA that this was compiled with. Never unloaded.
struct Library {
  void* blas = nullptr;
  void* lt = nullptr;

  /// `hint` is where the compiler's own CUDA keeps it.
  static void* open(const std::string& name) {
    for (const std::string& path : {name, std::string(SONICMOE_CUBLAS_HINT) + "/" + name}) {
      if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    }
    return nullptr;
  }

  template <class Function>
  void find(void* handle, const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (*function == nullptr) throw std::runtime_error(std::string("cuBLAS has no ") + name);
  }
};

// The header overloads its name.
using GemmStridedBatchedEx = cublasStatus_t(cublasHandle_t, cublasOperation_t, cublasOperation_t,
                                            int m, int n, int k, const void* alpha, const void* a,
                                            cudaDataType_t, int lda, long long stride_a,
                                            const void* b, cudaDataType_t, int ldb,
                                            long long stride_b, const void* beta, void* c,
                                            cudaDataType_t, int ldc, long long stride_c, int batch,
                                            cublasComputeType_t, cublasGemmAlgo_t);

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error(std::string("cuBLAS: ") + what + " returned " +
                             std::to_string(static_cast<int>(status)));
  }
}

/// An operand with `rows` rows of `columns` for each expert, row-major.
struct Operand {
  const Buffer* buffer;
  std::int64_t rows, columns;
  bool transpose;
  std::int64_t stride() const { return rows * columns; }
};

/// C = op(A) op(B) for every expert.
struct EvenGemm {
  const char* name;
  Operand a, b, c;
  std::int64_t m() const { return c.rows; }
  std::int64_t n() const { return c.columns; }
  std::int64_t k() const { return a.transpose ? a.rows : a.columns; }
};

}  // namespace

struct CublasBound::Data {
  Library library;
  GemmStridedBatchedEx* gemm_strided_batched;
  decltype(&cublasLtMatmul) lt_matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) lt_heuristic;
  decltype(&cublasLtMatmulDescCreate) lt_desc_create;
  decltype(&cublasLtMatmulDescSetAttribute) lt_desc_set;
  decltype(&cublasLtMatrixLayoutCreate) lt_layout_create;
  decltype(&cublasLtMatrixLayoutSetAttribute) lt_layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) lt_preference_create;
  decltype(&cublasLtMatmulPreferenceSetAttribute) lt_preference_set;

  cublasHandle_t handle = nullptr;  // never destroyed: the process ends with it
  cublasLtHandle_t lt_handle = nullptr;
  std::size_t version = 0;

  Sizes sizes;
  Device device;
  cudaDataType_t type;
  std::int64_t even = 0;  // rows of each expert
  Buffer rows_d, rows_w, rows_n, w1, w2, rows_out, weights_out, workspace;
  std::array<EvenGemm, 6> gemms;

  struct Matmul {
    cublasLtMatmulDesc_t desc = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
  };
  std::array<Matmul, 6> matmuls;

  Data(const Library& found, const LayerDesc& desc, std::int64_t rows, Device on,
       std::uint64_t seed)
      : library(found),
        sizes(desc),
        device(on),
        type(desc.experts.dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF),
        workspace(2 * kWorkspace, on) {
    find_functions();
    const Sizes& s = sizes;
    even = std::max<std::int64_t>(1, rows / s.e);
    const auto random = [&](std::int64_t count, std::int64_t columns, double scale) {
      return make_random(count * columns, desc.experts.dtype, scale, seed++, device);
    };
    rows_d = random(s.e * even, s.d, 0.2);
    rows_w = random(s.e * even, s.w, 0.02);
    rows_n = random(s.e * even, s.n, 0.02);
    w1 = random(s.e * s.w, s.d, 0.02);
    w2 = random(s.e * s.d, s.n, 0.02);
    rows_out = make_tensor(s.e * even * std::max({s.d, s.w, s.n}), desc.experts.dtype, device);
    if (!desc.experts.inference) {
      weights_out = make_tensor(s.e * s.d * std::max(s.w, s.n), desc.experts.dtype, device);
    }
    const auto of = [](const Buffer& buffer, std::int64_t count, std::int64_t columns,
                       bool transpose = false) {
      return Operand{&buffer, count, columns, transpose};
    };
    const Operand x = of(rows_d, even, s.d), x_t = of(rows_d, even, s.d, true);
    const Operand h = of(rows_w, even, s.w), h_t = of(rows_w, even, s.w, true);
    const Operand act = of(rows_n, even, s.n);
    gemms = {{{"up_proj", x, of(w1, s.w, s.d, true), of(rows_out, even, s.w)},
              {"down_proj", act, of(w2, s.d, s.n, true), of(rows_out, even, s.d)},
              {"down_proj_dgrad", x, of(w2, s.d, s.n), of(rows_out, even, s.n)},
              {"up_proj_dgrad", h, of(w1, s.w, s.d), of(rows_out, even, s.d)},
              {"down_proj_wgrad", x_t, act, of(weights_out, s.d, s.n)},
              {"up_proj_wgrad", h_t, x, of(weights_out, s.w, s.d)}}};
  }

  void find_functions() {
    decltype(&cublasCreate_v2) create;
    decltype(&cublasSetWorkspace_v2) set_workspace;
    decltype(&cublasLtCreate) lt_create;
    decltype(&cublasLtGetVersion) lt_version;
    library.find(library.blas, "cublasCreate_v2", &create);
    library.find(library.blas, "cublasSetWorkspace_v2", &set_workspace);
    library.find(library.blas, "cublasGemmStridedBatchedEx", &gemm_strided_batched);
    library.find(library.lt, "cublasLtCreate", &lt_create);
    library.find(library.lt, "cublasLtGetVersion", &lt_version);
    library.find(library.lt, "cublasLtMatmul", &lt_matmul);
    library.find(library.lt, "cublasLtMatmulAlgoGetHeuristic", &lt_heuristic);
    library.find(library.lt, "cublasLtMatmulDescCreate", &lt_desc_create);
    library.find(library.lt, "cublasLtMatmulDescSetAttribute", &lt_desc_set);
    library.find(library.lt, "cublasLtMatrixLayoutCreate", &lt_layout_create);
    library.find(library.lt, "cublasLtMatrixLayoutSetAttribute", &lt_layout_set);
    library.find(library.lt, "cublasLtMatmulPreferenceCreate", &lt_preference_create);
    library.find(library.lt, "cublasLtMatmulPreferenceSetAttribute", &lt_preference_set);
    check(create(&handle), "cublasCreate");
    check(set_workspace(handle, workspace.data(), kWorkspace), "cublasSetWorkspace");
    check(lt_create(&lt_handle), "cublasLtCreate");
    version = lt_version();
  }

  void* lt_workspace() const { return workspace.as<std::byte>() + kWorkspace; }

  // cuBLAS is column-major: it computes C^T = op(B)^T op(A)^T.
  Status run_batched(const EvenGemm& g) const {
    const float one = 1, zero = 0;
    const auto op = [](const Operand& x) { return x.transpose ? CUBLAS_OP_T : CUBLAS_OP_N; };
    check(
        gemm_strided_batched(
            handle, op(g.b), op(g.a), static_cast<int>(g.n()), static_cast<int>(g.m()),
            static_cast<int>(g.k()), &one, g.b.buffer->data(), type, static_cast<int>(g.b.columns),
            g.b.stride(), g.a.buffer->data(), type, static_cast<int>(g.a.columns), g.a.stride(),
            &zero, g.c.buffer->data(), type, static_cast<int>(g.c.columns), g.c.stride(),
            static_cast<int>(sizes.e), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmStridedBatchedEx");
    return {};
  }

  cublasLtMatrixLayout_t layout(const Operand& x) const {
    cublasLtMatrixLayout_t made = nullptr;
    const auto batch = static_cast<std::int32_t>(sizes.e);
    const std::int64_t stride = x.stride();
    check(lt_layout_create(&made, type, static_cast<std::uint64_t>(x.columns),
                           static_cast<std::uint64_t>(x.rows), x.columns),
          "cublasLtMatrixLayoutCreate");
    check(lt_layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)), "batch");
    check(lt_layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)),
          "stride");
    return made;
  }

  cublasStatus_t launch(const EvenGemm& g, const Matmul& m,
                        const cublasLtMatmulAlgo_t* algorithm) const {
    const float one = 1, zero = 0;
    return lt_matmul(lt_handle, m.desc, &one, g.b.buffer->data(), m.a, g.a.buffer->data(), m.b,
                     &zero, g.c.buffer->data(), m.c, g.c.buffer->data(), m.c, algorithm,
                     lt_workspace(), kWorkspace, nullptr);
  }

  /// Tries what the heuristics propose and keeps the fastest. False if they propose nothing.
  bool tune(std::size_t index) {
    const EvenGemm& g = gemms[index];
    Matmul& m = matmuls[index];
    const auto op = [](const Operand& x) { return x.transpose ? CUBLAS_OP_T : CUBLAS_OP_N; };
    const cublasOperation_t op_b = op(g.b), op_a = op(g.a);
    check(lt_desc_create(&m.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    check(lt_desc_set(m.desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof(op_b)), "transa");
    check(lt_desc_set(m.desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof(op_a)), "transb");
    m.a = layout(g.b), m.b = layout(g.a), m.c = layout(g.c);
    cublasLtMatmulPreference_t preference = nullptr;
    check(lt_preference_create(&preference), "cublasLtMatmulPreferenceCreate");
    check(lt_preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace,
                            sizeof(kWorkspace)),
          "workspace");
    std::array<cublasLtMatmulHeuristicResult_t, kProposals> proposals;
    int count = 0;
    if (lt_heuristic(lt_handle, m.desc, m.a, m.b, m.c, m.c, preference, kProposals,
                     proposals.data(), &count) != CUBLAS_STATUS_SUCCESS) {
      return false;
    }
    DeviceClock clock(device);
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < count; ++i) {
      double fastest = std::numeric_limits<double>::infinity();
      for (int repeat = 0; repeat < 4; ++repeat) {
        clock.start();
        const bool ran = launch(g, m, &proposals[i].algo) == CUBLAS_STATUS_SUCCESS;
        const double seconds = clock.stop();
        if (ran && repeat > 0) fastest = std::min(fastest, seconds);
      }
      if (fastest >= best) continue;
      best = fastest;
      m.algorithm = proposals[i].algo;
    }
    return best < std::numeric_limits<double>::infinity();
  }

  Status run_tuned(std::size_t index) const {
    check(launch(gemms[index], matmuls[index], &matmuls[index].algorithm), "cublasLtMatmul");
    return {};
  }

  double flops(const EvenGemm& g) const {
    return 2.0 * static_cast<double>(sizes.e) * static_cast<double>(g.m() * g.n()) *
           static_cast<double>(g.k());
  }
};

CublasBound::CublasBound(std::shared_ptr<Data> data, bool inference) {
  title_ = "cuBLAS " + std::to_string(data->version) + ", " + std::to_string(data->even) +
           " rows an expert";
  for (std::size_t i = 0; i < (inference ? 2 : 6); ++i) {
    const EvenGemm& gemm = data->gemms[i];
    std::vector<Candidate>& ways = candidates_.emplace_back();
    const auto add = [&](const char* way, std::function<Status()> run) {
      ways.push_back({groups_.size(), 0, way});
      groups_.push_back(
          {.tasks = {{.name = gemm.name, .run = std::move(run), .flops = data->flops(gemm)}}});
    };
    add("strided batched", [data, &gemm] { return data->run_batched(gemm); });
    if (data->tune(i)) add("cublasLt", [data, i] { return data->run_tuned(i); });
  }
}

std::unique_ptr<DenseBound> CublasBound::make(const LayerDesc& desc, std::int64_t rows,
                                              Device device, std::uint64_t seed, std::string* why) {
  const std::string major = "." + std::to_string(CUBLAS_VER_MAJOR);
  Library library;
  library.blas = Library::open("libcublas.so" + major);
  library.lt = Library::open("libcublasLt.so" + major);
  if (library.blas == nullptr || library.lt == nullptr) {
    *why = "no libcublas.so" + major + " (LD_LIBRARY_PATH)";
    return nullptr;
  }
  return std::unique_ptr<DenseBound>(new CublasBound(
      std::make_shared<Data>(library, desc, rows, device, seed), desc.experts.inference));
}

}  // namespace sonicmoe::cli

#else

namespace sonicmoe::cli {

std::unique_ptr<DenseBound> CublasBound::make(const LayerDesc&, std::int64_t, Device, std::uint64_t,
                                              std::string* why) {
  *why = "built without cuBLAS";
  return nullptr;
}

}  // namespace sonicmoe::cli

#endif
