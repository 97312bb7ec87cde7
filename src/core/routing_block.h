#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "sonicmoe/router.h"

namespace sonicmoe {

/// The origin of slots. It decides which arrays forward keeps for backward.
enum class SlotKind {
  top_k,    ///< slot t*K + k, scored by top_k, which chose its expert or got its id
  ids,      ///< slot t*K + k with an id and a weight of the caller
  lists,    ///< lists of the caller
  rounded,  ///< lists of token rounding
};

inline SlotKind slot_kind(const RoutingDesc& desc) {
  if (desc.takes_lists()) return SlotKind::lists;
  if (!desc.has_logits()) return SlotKind::ids;
  return desc.rounding.tile > 0 ? SlotKind::rounded : SlotKind::top_k;
}

/// Lays out the opaque block that carries a call's routing from forward to backward. Arrays follow
/// each other without padding; S is the number of slots.
///
/// | routing | bytes |
/// |---|---|
/// | top-K, or logits and ids | 20S + 4(2E+1), 24S with keeps_probabilities() |
/// | ids and weights | 12S + 4(2E+1) |
/// | lists | 16S + 4(2E+1) + 4(T+1) |
/// | lists, rounded | 24S + 4(2E+1) + 4(T+1) |
class RoutingBlock {
 public:
  static std::size_t bytes(const RoutingDesc& desc) { return lay_out(desc, nullptr, nullptr); }

  static RoutedRows at(const RoutingDesc& desc, void* memory) {
    RoutedRows rows;
    lay_out(desc, static_cast<char*>(memory), &rows);
    return rows;
  }

 private:
  static std::size_t lay_out(const RoutingDesc& desc, char* memory, RoutedRows* block) {
    std::size_t end = 0;
    const auto take = [&](auto RoutedRows::*array, std::int64_t count) {
      using Pointer = std::remove_reference_t<decltype(block->*array)>;
      if (block != nullptr && memory != nullptr) {
        block->*array = reinterpret_cast<Pointer>(memory + end);
      }
      end += 4 * static_cast<std::size_t>(count);
    };
    const SlotKind kind = slot_kind(desc);
    const std::int64_t slots = desc.slots();
    const bool lists = kind == SlotKind::lists || kind == SlotKind::rounded;
    if (kind == SlotKind::top_k) take(&RoutedRows::slot_scores, slots);
    if (desc.keeps_probabilities()) take(&RoutedRows::slot_probabilities, slots);
    if (desc.has_logits()) take(&RoutedRows::slot_experts, slots);
    if (kind == SlotKind::rounded) take(&RoutedRows::slot_tokens, slots);
    take(&RoutedRows::row_scores, slots);
    take(&RoutedRows::row_tokens, slots);
    take(&RoutedRows::slot_rows, slots);
    if (lists) {
      take(&RoutedRows::token_slots, slots);
      take(&RoutedRows::token_offsets, desc.tokens + 1);
    }
    take(&RoutedRows::offsets, desc.experts + 1);
    take(&RoutedRows::expert_order, desc.experts);
    return end;
  }
};

}  // namespace sonicmoe
