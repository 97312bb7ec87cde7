#pragma once

#include "math/exp.h"
#include "math/ieee.h"

/// Softmax whose order of summation is fixed, so that CPU and GPU give the same bits.
namespace sonicmoe::math {

/// Sum of term(0) .. term(n-1) in the order of a warp. Lane l of 32 starts from 0 and adds terms
/// `l, l+32, l+64, ...` in that order. Then lanes are added pairwise at distance `16, 8, 4, 2, 1`,
/// as in an xor butterfly.
template <class Term>
SONICMOE_HD float lane_sum32(int n, Term term) {
  float lane[32];
  for (int l = 0; l < 32; ++l) lane[l] = 0.0f;
  for (int i = 0; i < n; ++i) lane[i & 31] = add(lane[i & 31], term(i));
  for (int distance = 16; distance > 0; distance >>= 1) {
    for (int l = 0; l < distance; ++l) lane[l] = add(lane[l], lane[l + distance]);
  }
  return lane[0];
}

/// Numerator of a logit's probability e^(x - max) / sum. The caller divides by the sum with
/// math::div(), one IEEE division.
SONICMOE_HD float softmax_term(float x, float max) { return exp(sub(x, max)); }

}  // namespace sonicmoe::math
