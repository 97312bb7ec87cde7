// The portable entries of up_proj.
#include <algorithm>
#include <cmath>

#include "cuda/sm80/up_proj.cuh"

namespace sonicmoe::cuda {
namespace sm80 {
namespace {

/// m blocks of all experts. It is the mean of three cases: each expert has the mean number of rows,
/// or one standard deviation of random routing more, or less.
double m_blocks(std::int64_t rows, std::int64_t experts) {
  experts = std::clamp<std::int64_t>(experts, 1, std::max<std::int64_t>(rows, 1));
  const double mean = static_cast<double>(rows) / static_cast<double>(experts);
  double sum = 0;
  for (int side = -1; side <= 1; ++side) {
    sum += std::max(1.0, std::ceil((mean + side * std::sqrt(mean)) / kTileM));
  }
  return sum / 3 * static_cast<double>(experts);
}

/// A multiprocessor has one wide tile at a time, or two narrow ones, which take as long; a narrow
/// one alone takes half. The wide tile reads a quarter less, so a hot chip clocks higher; but
/// nothing multiplies while it begins or ends. So it is for long sums, and where it ends no later.
std::string defer(const GroupedGemmDesc& d, const DeviceTraits& device) {
  if (d.hidden < 2048) return "hidden is below 2048: a wide tile idles longer than it saves";
  const int units = is_glu(d.activation) ? 128 : 256;
  const int wide = tiles(d.intermediate, units), narrow = tiles(d.intermediate, units / 2);
  const double each = m_blocks(d.usual_rows(), d.experts) / std::max(device.multiprocessors, 1);
  const double wide_time = std::ceil(each * wide);
  const double narrow_time = each * narrow <= 1 ? 0.5 : std::ceil(each * narrow / 2);
  if (wide_time <= narrow_time) return {};
  return std::to_string(narrow) + " narrow tiles across take less time than " +
         std::to_string(wide);
}

}  // namespace
}  // namespace sm80

constinit const Kernel<GroupedGemmDesc> kPortableUpProj256 =
    sm80::entry<sm80::UpProj<256>, GroupedGemmDesc>({.op = "up_proj",
                                                     .name = "sm80.up_proj.128x256",
                                                     .reject = sm80::reject_gemm<256>,
                                                     .defer = sm80::defer});
constinit const Kernel<GroupedGemmDesc> kPortableUpProj128 =
    sm80::entry<sm80::UpProj<128>, GroupedGemmDesc>(
        {.op = "up_proj", .name = "sm80.up_proj.128x128", .reject = sm80::reject_gemm<128>});

}  // namespace sonicmoe::cuda
