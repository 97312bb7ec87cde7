#pragma once

#include <vector>

#include "testkit/rounding.h"
#include "testkit/run.h"

/// Layers with token rounding (LayerDesc::rounding_tile > 0). check_layer() and check_ops() hand
/// such cases over.
namespace sonicmoe::testkit {

/// Draws of every such layer that run_layer() runs: past 32 bits, so that none may be lost.
inline constexpr std::uint64_t kRoundingSeed = 0x1234567800000009;
inline constexpr std::uint64_t kRoundingOffset = 0x9abcdef000000005;

/// By the oracle: the entries are those of the reference for the layer's own logits; they are then
/// held fixed, and every tensor is compared.
Report check_rounded_layer(const Case& test_case, Device device = {}, const Options& options = {});

/// Bit for bit: what the layer computes is what it computes when its entries are given as lists,
/// joined with token_rounding_grad and the router's own gradients.
Report check_rounding_as_given(const Problem& problem, const LayerRun& run,
                               const RoundedLists& lists, Device device = {},
                               const Options& options = {});

/// check_rounding_as_given(), then each operation that the layer has in common with given lists.
std::vector<Report> check_rounded_ops(const Case& test_case, Device device = {},
                                      const Options& options = {});

}  // namespace sonicmoe::testkit
