#pragma once

#include <cstddef>
#include <cstdint>

#include "sonicmoe/layer.h"

namespace sonicmoe {

/// The opaque block that carries a layer's routing from forward to backward: 20 bytes a row and
/// 4(E+1), or 16 bytes a row and 4(E+1) + 4(T+1) for lists. Arrays follow each other without
/// padding; R is the row capacity.
struct RoutingBlock {
  float* slot_scores = nullptr;           ///< (R) router modes
  std::int32_t* slot_experts = nullptr;   ///< (R) router modes
  float* row_scores = nullptr;            ///< (R)
  std::int32_t* row_tokens = nullptr;     ///< (R)
  std::int32_t* slot_rows = nullptr;      ///< (R)
  std::int32_t* token_slots = nullptr;    ///< (R) lists
  std::int32_t* token_offsets = nullptr;  ///< (T+1) lists
  std::int32_t* offsets = nullptr;        ///< (E+1)

  static std::size_t bytes(const LayerDesc& desc) {
    const bool lists = desc.router == RouterMode::given;
    const std::size_t rows = static_cast<std::size_t>(desc.rows());
    const std::size_t ends =
        static_cast<std::size_t>(desc.experts + 1 + (lists ? desc.tokens + 1 : 0));
    return 4 * ((lists ? 4 : 5) * rows + ends);
  }

  static RoutingBlock at(const LayerDesc& desc, void* memory) {
    char* next = static_cast<char*>(memory);
    auto take = [&next](auto*& pointer, std::int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(next);
      next += 4 * count;
    };
    const bool lists = desc.router == RouterMode::given;
    const std::int64_t rows = desc.rows();
    RoutingBlock block;
    if (!lists) {
      take(block.slot_scores, rows);
      take(block.slot_experts, rows);
    }
    take(block.row_scores, rows);
    take(block.row_tokens, rows);
    take(block.slot_rows, rows);
    if (lists) {
      take(block.token_slots, rows);
      take(block.token_offsets, desc.tokens + 1);
    }
    take(block.offsets, desc.experts + 1);
    return block;
  }
};

}  // namespace sonicmoe
