#pragma once

#include <cstdint>
#include <functional>

#include "testkit/cases.h"
#include "testkit/oracle.h"

namespace sonicmoe::testkit {

/// Random numbers as a function of (seed, stream, index), the same on every machine: integer
/// arithmetic and sums that are exact, no library functions.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : key_(mix(seed) ^ mix(~stream)) {}

  std::uint64_t bits(std::uint64_t index) const { return mix(key_ + index); }
  /// 0 .. bound-1
  std::int64_t below(std::uint64_t index, std::int64_t bound) const {
    return static_cast<std::int64_t>(bits(index) % static_cast<std::uint64_t>(bound));
  }
  double uniform(std::uint64_t index) const {  ///< in [0, 1)
    return static_cast<double>(bits(index) >> 11) * 0x1p-53;
  }
  /// Mean 0, variance 1, bell-shaped: four 16-bit uniforms added, so within +-3.47.
  double normal(std::uint64_t index) const;

 private:
  static std::uint64_t mix(std::uint64_t z);  // splitmix64
  std::uint64_t key_;
};

/// The inputs of a case, every tensor already rounded to the storage type.
Problem make_problem(const Case& test_case);

/// What the six GEMM operations and the bias gradients read. Rows are grouped rows in use.
struct GemmInputs {
  Routing routing;
  Tensor slot_scores;     ///< (slots)
  Tensor x, dout;         ///< (T, d)
  Tensor w1, b1, w2, b2;  ///< [gate | up]; biases may be empty
  Tensor preact;          ///< (rows, W)
  Tensor act;             ///< (rows, n)
  Tensor dpreact;         ///< (rows, W)
  Tensor scaled_act;      ///< (rows, n)
  Tensor dw1, dw2;  ///< what gradients are added to, [gate | up]; accumulate_weight_grads only
  std::vector<std::int32_t> expert_order;  ///< empty: not given
  /// How a GEMM operation is run; null: as OpPlan::run() does.
  std::function<Status(const OpPlan<GroupedGemmDesc>&, const GroupedGemmArgs&, Workspace)> run;
};

/// Small integers and powers of two, so that every sum is exact in fp32 in any order: a right
/// implementation agrees bit for bit with Precision::rounded. Gates are 0 or +-64, where every
/// activation and its slope are exact but for terms below 2^-60; scores are not all 1, gate and up
/// differ. The tensors do not follow from each other.
///
/// A finite limit is 32 or 48. Some gates are the limit itself, others 8 below it; a quarter of the
/// ups in `preact` lie at the limit of either sign and beyond. A gate of 40 saturates a sigmoid
/// in fp64, too; one of 24 needs an alpha of 2. Scales (alpha and beta of a tanh) are powers of two
/// of at most 1 and 1/32, so that every number but 0 saturates.
GemmInputs integer_inputs(const LayerDesc& desc, Routing routing, std::uint64_t seed);

}  // namespace sonicmoe::testkit
