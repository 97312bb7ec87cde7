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

template <class Real>
struct Score {
  Real value, slope;
};

/// A score that needs no sum over experts, and its dp/dz.
template <class Real>
Score<Real> score_of(RouterScore score, Real z) {
  const Real sigmoid = z >= 0 ? 1 / (1 + std::exp(-z)) : std::exp(z) / (1 + std::exp(z));
  if (score == RouterScore::sigmoid) {
    const Real rest = z >= 0 ? std::exp(-z) / (1 + std::exp(-z)) : 1 / (1 + std::exp(z));
    return {sigmoid, sigmoid * rest};
  }
  const Real p = std::sqrt(std::max(z, Real{0}) + std::log1p(std::exp(-std::fabs(z))));
  return {p, p == 0 ? 0 : sigmoid / (2 * p)};
}

}  // namespace sonicmoe::testkit
