// Sorts slots into grouped rows by stable counting sorts: lists first by token, then all slots by
// expert. One thread does it, with a few operations a row against thousands in the GEMMs.
#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <numeric>

#include "core/backends.h"
#include "cpu/dispatch.h"
#include "math/load_class.h"

namespace sonicmoe::cpu {
namespace {

Status check_lists(const MetadataDesc& d, const MetadataArgs& a) {
  for (std::int64_t s = 0; s < d.list_length; ++s) {
    if (a.slot_tokens[s] < 0 || a.slot_tokens[s] >= d.tokens) {
      return Status::error(StatusCode::invalid_data,
                           "token ids: got %d at position %" PRId64 ", allowed: 0 to %" PRId64,
                           a.slot_tokens[s], s, d.tokens - 1);
    }
    if (d.assume_sorted && s > 0 && a.slot_tokens[s] < a.slot_tokens[s - 1]) {
      return Status::error(StatusCode::invalid_data,
                           "token ids: got %d after %d at position %" PRId64
                           ", allowed: ascending ids with assume_sorted",
                           a.slot_tokens[s], a.slot_tokens[s - 1], s);
    }
  }
  return {};
}

/// Has the slot an expert? Otherwise it is a sentinel.
bool has_expert(const MetadataDesc& d, const MetadataArgs& a, std::int64_t slot) {
  return a.slot_experts[slot] >= 0 && a.slot_experts[slot] < d.experts;
}

/// Takes the number of items with key i in ends[i+1], and 0 in ends[0]. Leaves in ends[i] where key
/// i starts.
void exclusive_sums(std::int32_t* ends, std::int64_t keys) {
  for (std::int64_t i = 0; i < keys; ++i) ends[i + 1] += ends[i];
}

/// Lists only: sorts the slots that are no sentinels by token (stable) into token_slots, and writes
/// token_offsets. `next` is T words of scratch.
void sort_by_token(const MetadataDesc& d, const MetadataArgs& a, std::int32_t* next) {
  std::fill_n(a.token_offsets, d.tokens + 1, 0);
  for (std::int64_t s = 0; s < d.slots(); ++s) {
    if (has_expert(d, a, s)) ++a.token_offsets[a.slot_tokens[s] + 1];
  }
  exclusive_sums(a.token_offsets, d.tokens);
  std::copy_n(a.token_offsets, d.tokens, next);
  for (std::int64_t s = 0; s < d.slots(); ++s) {
    if (has_expert(d, a, s)) {
      a.token_slots[next[a.slot_tokens[s]]++] = static_cast<std::int32_t>(s);
    }
  }
}

std::size_t workspace(const MetadataDesc& desc, const Exec&) {
  return static_cast<std::size_t>(std::max(desc.experts, desc.top_k > 0 ? 0 : desc.tokens)) * 4;
}

Status run(const MetadataDesc& d, const MetadataArgs& a, void* memory, const Exec&) noexcept {
  if (Status status = check_lists(d, a); !status.ok()) return status;
  std::int32_t* next = static_cast<std::int32_t*>(memory);
  const std::int64_t slots = d.slots();
  const bool lists = d.top_k == 0;
  if (lists) sort_by_token(d, a, next);

  std::fill_n(a.offsets, d.experts + 1, 0);
  for (std::int64_t s = 0; s < slots; ++s) {
    if (has_expert(d, a, s)) ++a.offsets[a.slot_experts[s] + 1];
    a.slot_rows[s] = -1;
  }
  std::copy_n(a.offsets + 1, d.experts, a.counts);
  exclusive_sums(a.offsets, d.experts);
  std::copy_n(a.offsets, d.experts, next);

  const std::int64_t routed = a.offsets[d.experts];
  const std::int64_t sorted = lists ? routed : slots;
  for (std::int64_t i = 0; i < sorted; ++i) {
    const std::int64_t s = lists ? a.token_slots[i] : i;
    if (!has_expert(d, a, s)) continue;
    const std::int32_t row = next[a.slot_experts[s]]++;
    a.slot_rows[s] = row < d.rows() ? row : -1;
    a.row_slots[row] = static_cast<std::int32_t>(s);
    a.row_tokens[row] = lists ? a.slot_tokens[s] : static_cast<std::int32_t>(s / d.top_k);
    if (a.row_scores != nullptr) a.row_scores[row] = a.slot_scores[s];
  }
  for (std::int64_t row = routed; row < slots; ++row) {
    a.row_slots[row] = -1;
    a.row_tokens[row] = 0;
    if (a.row_scores != nullptr) a.row_scores[row] = 0.0f;
    if (lists) a.token_slots[row] = -1;
  }
  const auto last = static_cast<std::int32_t>(d.rows());
  for (std::int64_t e = 0; e <= d.experts; ++e) a.offsets[e] = std::min(a.offsets[e], last);
  if (a.expert_order != nullptr) {
    const math::LoadClass load(d.experts, d.rows());
    std::iota(a.expert_order, a.expert_order + d.experts, 0);
    std::sort(a.expert_order, a.expert_order + d.experts, [&](std::int32_t e, std::int32_t f) {
      const std::int32_t mine = load(a.counts[e]), other = load(a.counts[f]);
      return mine > other || (mine == other && e < f);
    });
  }
  return {};
}

}  // namespace

const Kernel<MetadataDesc> kMetadata = {
    .op = "metadata",
    .name = "cpu.metadata",
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cpu
