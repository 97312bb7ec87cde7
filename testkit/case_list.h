#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "testkit/cases.h"

/// What the parts of the case list are made with.
namespace sonicmoe::testkit {

inline LayerDesc shape(std::int64_t T, std::int64_t d, std::int64_t n, std::int64_t E,
                       std::int64_t K) {
  LayerDesc desc;
  desc.tokens = T;
  desc.experts.hidden = d;
  desc.experts.intermediate = n;
  desc.router.experts = E;
  desc.router.top_k = K;
  return desc;
}

/// Collects cases, each in both types with its own seed.
class CaseList {
 public:
  explicit CaseList(DType first = DType::f32, DType second = DType::bf16) : types_{first, second} {}

  void add(const std::string& name, LayerDesc desc, RoutingKind routing = RoutingKind::random,
           bool outside_dlogits = false) {
    for (const DType dtype : types_) {
      desc.experts.dtype = dtype;
      Case c;
      c.name = name + "/" + sonicmoe::name(dtype);
      c.desc = desc;
      c.routing = routing;
      c.outside_dlogits = outside_dlogits;
      c.seed = cases_.size() + 1;
      cases_.push_back(std::move(c));
    }
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::array<DType, 2> types_;
  std::vector<Case> cases_;
};

/// Cases of the routers that are not RouterDesc::plain(), and of types other than x's.
void add_scored_routers(CaseList* list);

}  // namespace sonicmoe::testkit
