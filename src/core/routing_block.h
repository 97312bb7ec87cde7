#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "sonicmoe/layer.h"

namespace sonicmoe {

/// How slots come about, which decides what backward has to be given.
enum class SlotKind {
  top_k,    ///< t*K + k
  given,    ///< the caller's lists
  rounded,  ///< lists made by token rounding
};

inline SlotKind slot_kind(const LayerDesc& desc) {
  if (desc.router.given()) return SlotKind::given;
  return desc.rounding.tile > 0 ? SlotKind::rounded : SlotKind::top_k;
}

/// The opaque block that carries a layer's routing from forward to backward: 20 bytes a row and
/// 4(2E+1) for top-K; 16 (given) or 24 (rounded) bytes a row and 4(2E+1) + 4(T+1) for lists. Arrays
/// follow each other without padding; R is the row capacity.
struct RoutingBlock {
  float* slot_scores = nullptr;           ///< (R) top-K
  std::int32_t* slot_experts = nullptr;   ///< (R) top-K, rounded
  std::int32_t* slot_tokens = nullptr;    ///< (R) rounded
  float* row_scores = nullptr;            ///< (R)
  std::int32_t* row_tokens = nullptr;     ///< (R)
  std::int32_t* slot_rows = nullptr;      ///< (R)
  std::int32_t* token_slots = nullptr;    ///< (R) lists
  std::int32_t* token_offsets = nullptr;  ///< (T+1) lists
  std::int32_t* offsets = nullptr;        ///< (E+1)
  std::int32_t* expert_order = nullptr;   ///< (E)

  static std::size_t bytes(const LayerDesc& desc) { return lay_out(desc, nullptr, nullptr); }

  static RoutingBlock at(const LayerDesc& desc, void* memory) {
    RoutingBlock block;
    lay_out(desc, static_cast<char*>(memory), &block);
    return block;
  }

 private:
  static std::size_t lay_out(const LayerDesc& desc, char* memory, RoutingBlock* block) {
    std::size_t end = 0;
    const auto take = [&](auto RoutingBlock::*array, std::int64_t count) {
      using Pointer = std::remove_reference_t<decltype(block->*array)>;
      if (block != nullptr) block->*array = reinterpret_cast<Pointer>(memory + end);
      end += 4 * static_cast<std::size_t>(count);
    };
    const SlotKind kind = slot_kind(desc);
    const std::int64_t rows = desc.rows();
    if (kind == SlotKind::top_k) take(&RoutingBlock::slot_scores, rows);
    if (kind != SlotKind::given) take(&RoutingBlock::slot_experts, rows);
    if (kind == SlotKind::rounded) take(&RoutingBlock::slot_tokens, rows);
    take(&RoutingBlock::row_scores, rows);
    take(&RoutingBlock::row_tokens, rows);
    take(&RoutingBlock::slot_rows, rows);
    if (kind != SlotKind::top_k) {
      take(&RoutingBlock::token_slots, rows);
      take(&RoutingBlock::token_offsets, desc.tokens + 1);
    }
    take(&RoutingBlock::offsets, desc.router.experts + 1);
    take(&RoutingBlock::expert_order, desc.router.experts);
    return end;
  }
};

}  // namespace sonicmoe
