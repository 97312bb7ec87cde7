#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "testkit/oracle.h"

/// Shared by the parts of the oracle.
namespace sonicmoe::testkit {

/// Calls f with a value of the type that sums are made in.
template <class F>
auto in_precision(Precision precision, F f) {
  return precision == Precision::plain ? f(float{}) : f(double{});
}

template <class Real>
std::vector<Real> softmax(const std::vector<Real>& x) {
  std::vector<Real> p(x);
  if (x.empty()) return p;
  const Real max = *std::max_element(x.begin(), x.end());
  Real sum = 0;
  for (Real& value : p) sum += value = std::exp(value - max);
  for (Real& value : p) value /= sum;
  return p;
}

}  // namespace sonicmoe::testkit
