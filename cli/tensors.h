#pragma once

#include <initializer_list>
#include <utility>

#include "buffer.h"
#include "settings.h"

namespace sonicmoe::cli {

/// The sizes that come up everywhere; see LayerDesc.
struct Sizes {
  explicit Sizes(const LayerDesc& desc);
  std::int64_t t, d, n, e, k, r, w;
};

/// Rows of all experts together, and of an expert.
struct RowCounts {
  std::int64_t all;
  std::int32_t fewest, most;
};

/// Every tensor of a layer, with random inputs: x 0.2 randn, weights 0.02 randn, dO 0.2 randn. What
/// RouterInput lets the caller hand over is what the router would have made of x.
/// With `skew` s above 0 the i-th most popular expert's logits are lower by s ln i times their
/// standard deviation; which experts those are is drawn by `seed`, too.
struct LayerTensors {
  LayerTensors(const LayerDesc& desc, const SavedBytes& saved, std::uint64_t seed, double skew,
               Device device);

  ForwardArgs forward_args() const;
  BackwardArgs backward_args() const;
  /// Once forward has written `counts`.
  RowCounts row_counts() const;

  Buffer x, router_w, w1, b1, w2, b2, dout;  // inputs
  Buffer ids, weights;                       // (T, K) of the caller, where it hands them over
  Buffer logit_bias, selection_bias, expert_scale;  // (E), where the router has them
  Buffer o, logits, counts, preact, routing;  // written by forward; logits may be the caller's
  Buffer dx, drouter_w, dw1, db1, dw2, db2;   // written by backward
  Buffer dpreact;                             // likewise, where the workspace does not hold it
  Buffer dlogits, dscores;                    // of the caller's logits and weights
  Buffer dlogit_bias, dexpert_scale;
  std::uint64_t draws;  // seed of token rounding

 private:
  void route(const LayerDesc& desc, Device device);
  void skew_router(const LayerDesc& desc, double skew) const;
  RouterDesc router_;
};

/// Sum of sizes, for GB/s.
double total_bytes(std::initializer_list<const Buffer*> buffers);

}  // namespace sonicmoe::cli
