#pragma once

#include <cinttypes>
#include <cstdint>

#include "sonicmoe/ops.h"
#include "sonicmoe/status.h"

namespace sonicmoe {

/// ExpertsForwardArgs::segments: three arrays (E), as SegmentsArgs describes them.
struct Segments {
  std::int32_t* begins = nullptr;
  std::int32_t* ends = nullptr;
  std::int32_t* expert_order = nullptr;

  static Segments at(std::int32_t* memory, std::int64_t experts) {
    if (memory == nullptr) return {};
    return {memory, memory + experts, memory + 2 * experts};
  }
};

/// The rows behind each expert's last, of GroupedGemmArgs or BiasGradArgs.
template <class Args>
const std::int32_t* row_ends(const Args& args) {
  return args.ends != nullptr ? args.ends : args.offsets + 1;
}

/// Number i of counts or row_offsets.
inline std::int64_t index_at(const SegmentsDesc& d, const void* array, std::int64_t i) {
  switch (d.index_type) {
    case IndexType::i64:
      return static_cast<const std::int64_t*>(array)[i];
    case IndexType::i32:
      break;
  }
  return static_cast<const std::int32_t*>(array)[i];
}

/// Calls f(expert, begin, end) for each expert in order, with counts and row_offsets in host
/// memory. Returns the error of the first segment that overlaps the one before it or reaches past
/// the rows.
template <class F>
Status for_each_segment(const SegmentsDesc& d, const SegmentsArgs& a, F&& f) {
  // Offset i, unless it lies outside `least` .. R.
  const auto offset = [&](std::int64_t i, std::int64_t least, std::int64_t* out) {
    *out = index_at(d, a.row_offsets, i);
    if (*out >= least && *out <= d.rows) return Status();
    return Status::error(StatusCode::invalid_data,
                         "row_offsets: got %" PRId64 " at position %" PRId64 ", allowed: %" PRId64
                         ", the end of the rows before, to %" PRId64 ", the number of rows",
                         *out, i, least, d.rows);
  };
  std::int64_t end = 0;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    std::int64_t begin = end;
    if (a.row_offsets != nullptr) {
      if (Status status = offset(e, end, &begin); !status.ok()) return status;
    }
    if (a.counts == nullptr) {
      if (Status status = offset(e + 1, begin, &end); !status.ok()) return status;
    } else {
      const std::int64_t count = index_at(d, a.counts, e);
      if (count < 0 || count > d.rows - begin) {
        return Status::error(StatusCode::invalid_data,
                             "counts: got %" PRId64 " at position %" PRId64
                             ", allowed: 0 to %" PRId64 ", the rows from row %" PRId64 " on",
                             count, e, d.rows - begin, begin);
      }
      end = begin + count;
    }
    f(e, begin, end);
  }
  return {};
}

}  // namespace sonicmoe
