// Which contiguous rows each expert owns, from counts, offsets or both. One thread: a few
// operations an expert.
#include "core/segments.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/backends.h"
#include "math/load_class.h"

namespace sonicmoe::cpu {
namespace {

Status run(const SegmentsDesc& d, const SegmentsArgs& a, void*, const Exec&) noexcept {
  Status status = for_each_segment(d, a, [](std::int64_t, std::int64_t, std::int64_t) {});
  if (!status.ok()) return status;  // before anything is written
  status = for_each_segment(d, a, [&](std::int64_t e, std::int64_t begin, std::int64_t end) {
    a.begins[e] = static_cast<std::int32_t>(begin);
    a.ends[e] = static_cast<std::int32_t>(end);
  });
  const math::LoadClass load(d.experts, d.expected_rows > 0 ? d.expected_rows : d.rows);
  std::iota(a.expert_order, a.expert_order + d.experts, 0);
  std::sort(a.expert_order, a.expert_order + d.experts, [&](std::int32_t e, std::int32_t f) {
    const std::int32_t mine = load(a.ends[e] - a.begins[e]), other = load(a.ends[f] - a.begins[f]);
    return mine > other || (mine == other && e < f);
  });
  return status;
}

}  // namespace

const Kernel<SegmentsDesc> kSegments = {
    .op = "segments",
    .name = "cpu.segments",
    .run = run,
};

}  // namespace sonicmoe::cpu
