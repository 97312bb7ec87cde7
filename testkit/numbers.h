#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sonicmoe/types.h"

namespace sonicmoe::testkit {

/// The oracle holds every tensor, whatever its storage type, as doubles.
using Tensor = std::vector<double>;

/// The nearest value of the storage type, ties to even; overflow gives infinity, NaN stays NaN.
double round_to(double value, DType type);

/// A tensor as the library stores it, and back. Encoding rounds.
std::vector<std::byte> encode(const Tensor& values, DType type);
Tensor decode(std::span<const std::byte> bytes, DType type);

/// Frobenius norms. A NaN or infinity anywhere makes `error` NaN or infinite.
struct ErrorNorm {
  double error = 0;  ///< ||ours - exact||
  double norm = 0;   ///< ||exact||
  std::size_t size = 0;
};
ErrorNorm error_norm(std::span<const double> ours, std::span<const double> exact);

/// The outcome of comparing one tensor. Both figures are relative to the norm of the exact tensor
/// (absolute where that is zero), and are those of the worst block.
struct Check {
  std::string tensor;
  double error = 0;
  double bound = 0;
  bool pass = false;
  std::string note;  ///< which block is worst, or what else is wrong
};

/// What a bound allows beside the 2x rule.
struct Slack {
  double relative = 0;     ///< times ||exact||: see tensor_core_allowance
  double absolute = 0;     ///< in every block: see cancellation_allowance
  double independent = 0;  ///< so many of its errors are, if others repeat them: see router_slack
};

/// The 2x rule, for the whole tensor and for each block (an expert's rows or weights): our error is
/// at most twice that of a plain loop in the same precision,
///
///   ||ours - exact|| <= 2 max(||plain - exact||, share)
///                       + (4 2^-24 (1 + 4 / sqrt(m)) + relative) ||exact|| + absolute.
///
/// The errors of a block of n elements scatter by chance, the more the smaller it is, so that a
/// good result can be unlucky where the plain loop was lucky. Hence `share`: the error that the
/// block would have if the plain loop's error were spread evenly over the tensor; and
/// 4 2^-24 (1 + 4 / sqrt(m)), four fp32 roundings of each element, more where there are few to
/// average over: m is n, or the block's share of the independent errors, at least one.
///
/// `block_ends` are element indices, ascending; the last is the tensor's size. Empty: one block.
Check two_times_rule(const std::string& tensor, std::span<const double> ours,
                     std::span<const double> exact, std::span<const double> plain,
                     std::span<const std::size_t> block_ends = {}, const Slack& slack = {});

/// Tensor cores add 16 products at a time to the fp32 accumulator and cut off what does not fit,
/// where the plain loop rounds: each of k/16 steps takes up to one unit in the last place, half of
/// it on average and always towards zero, from partial sums that are smaller than the whole. So
/// what is never rounded to 16 bits is smaller by up to k/16 * 2^-24.
inline double tensor_core_allowance(std::int64_t k) {
  return static_cast<double>((k + 15) / 16) * 0x1p-24;
}

/// Where an element is a difference of terms, their roundings stay, however small it is itself:
/// four fp32 roundings of each element's sum of magnitudes.
double cancellation_allowance(std::span<const double> magnitudes);

/// Same bits (signs of zero aside); error is the largest absolute difference, bound 0.
Check same_values(const std::string& tensor, std::span<const double> ours,
                  std::span<const double> expected);

}  // namespace sonicmoe::testkit
