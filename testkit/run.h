#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "sonicmoe/layer.h"
#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/cases.h"
#include "testkit/inputs.h"
#include "testkit/layouts.h"
#include "testkit/oracle.h"

/// Runs the library in guarded, poisoned memory of exactly the sizes it asks for, and judges what
/// comes out by the oracle.
namespace sonicmoe::testkit {

/// What one call of forward and backward left behind.
struct LayerRun {
  Status status;       ///< of the first step that failed, plan, forward or backward
  std::string damage;  ///< what was written outside its bounds, or which input was changed
  Routing routing;     ///< the lists, or the experts that the library chose; not if rounded
  std::vector<std::int32_t> counts;
  std::vector<std::int32_t> frequency;  ///< token rounding only
  LayerTensors tensors;                 ///< those that the library returns, and preact
};
LayerRun run_layer(const Problem& problem, Device device = {}, const Options& options = {});

/// LayerPlan::explain(), or that of an ExpertsPlan for the experts alone on contiguous rows.
Result<std::string> explain(const LayerDesc& desc, Device device = {}, const Options& options = {});

/// Same bits in every tensor that the library returns; "" or the name of the first that differs.
std::string first_difference(const LayerRun& a, const LayerRun& b);

/// One of the six GEMM operations; `tensors` holds what it writes.
struct GemmRun {
  std::string failure;
  LayerTensors tensors;
  std::vector<std::byte> workspace;  ///< what the operation left there
};
GemmRun run_gemm(GemmOp op, const LayerDesc& desc, const GemmInputs& inputs, Device device = {},
                 const Options& options = {});
/// The same by the oracle.
LayerTensors oracle_gemm(GemmOp op, const LayerDesc& desc, const GemmInputs& inputs,
                         Precision precision);
inline constexpr GemmOp kGemmOps[] = {GemmOp::up_proj,         GemmOp::down_proj,
                                      GemmOp::down_proj_dgrad, GemmOp::up_proj_dgrad,
                                      GemmOp::down_proj_wgrad, GemmOp::up_proj_wgrad};
const char* name(GemmOp op);

struct Report {
  std::string name;     ///< the layer or the operation
  std::string failure;  ///< a status, a damaged buffer: no figures; "" if the run went through
  std::vector<Check> checks;
  bool pass() const;
  std::string text() const;  ///< one line per check
};

/// Forward and, unless the case is for inference, backward of a whole layer.
Report check_layer(const Case& test_case, Device device = {}, const Options& options = {});
/// Every tensor that a GEMM operation can write, with its name and whether its blocks are experts'
/// weights (else rows).
struct GemmOutput {
  const char* name;
  Tensor LayerTensors::*member;
  bool weights;
};
inline constexpr GemmOutput kGemmOutputs[] = {{"preact", &LayerTensors::preact, false},
                                              {"act", &LayerTensors::act, false},
                                              {"expert_out", &LayerTensors::expert_out, false},
                                              {"dpreact", &LayerTensors::dpreact, false},
                                              {"scaled_act", &LayerTensors::scaled_act, false},
                                              {"row_dscores", &LayerTensors::row_dscores, false},
                                              {"dx_rows", &LayerTensors::dx_rows, false},
                                              {"dw1", &LayerTensors::dw1, true},
                                              {"dw2", &LayerTensors::dw2, true}};

/// Element indices where the experts' parts of a tensor end: equal parts, or their rows. Parts of
/// weights go together until they have `least_rows`.
std::vector<std::size_t> expert_ends(const Grouping& g, std::size_t size, bool weights,
                                     std::int64_t least_rows = 0);

/// For the gradient of the router's weights, where all of a row's error is that of one number, and
/// for dS, a number a row: the 2x rule says little of few rows. The squared error of m rows
/// scatters by sqrt(2 / m) of its mean: by a third here, where the rule allows four times the mean.
inline constexpr std::int64_t kLeastRows = 16;

/// Of the same gradient: how many errors it has that are independent. A row of it repeats those of
/// its tokens' dlogits, and of a token's dlogits one follows from the others, for they add up to 0.
inline Slack router_slack(const Grouping& g, std::int64_t tokens) {
  return {.independent = std::max(1.0, static_cast<double>(std::ssize(g.row_slots) - tokens))};
}

/// What logits that stay fp32 may be off beside the 2x rule. On CUDA tensor cores add them up; with
/// an fp32 router weight, 256 products at a time.
Slack logits_slack(const LayerDesc& desc, Device device);

/// Each operation that the case's layer is made of, fed with the oracle's rounded tensors.
std::vector<Report> check_ops(const Case& test_case, Device device = {},
                              const Options& options = {});
/// The same for a problem that no case describes.
std::vector<Report> check_ops(const Problem& problem, Device device = {},
                              const Options& options = {});

}  // namespace sonicmoe::testkit
