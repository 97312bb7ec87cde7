#include "testkit/cases.h"

#include <algorithm>
#include <array>
#include <functional>
#include <set>

#include "testkit/case_list.h"

namespace sonicmoe::testkit {
namespace {

constexpr std::array kTileCounts = {127, 128, 129, 0, 1, 255, 256, 257};

/// d and n are no multiples of 16, 32 or 64.
LayerDesc usual() { return shape(61, 72, 40, 6, 2); }

LayerDesc with(LayerDesc desc, W1Layout layout) {
  desc.experts.w1_layout = layout;
  return desc;
}

LayerDesc list_shape(std::int64_t T, std::int64_t E, std::int64_t length) {
  LayerDesc desc = shape(T, 72, 40, E, 0);
  desc.router.input = RouterInput::lists;
  desc.router.list_length = length;
  return desc;
}

ActivationSpec limited(Activation kind, float limit) {
  ActivationSpec spec = kind;
  spec.limit = limit;
  return spec;
}

ActivationSpec scaled(float alpha, float beta) {
  ActivationSpec spec = Activation::situ_glu;
  spec.alpha = alpha;
  spec.beta = beta;
  return spec;
}

/// Activations with parameters that numbers of size one notice.
std::vector<NamedActivation> with_parameters() {
  ActivationSpec oai = limited(Activation::swiglu_oai, 0.75f);
  oai.alpha = 1.25f;
  return {{"swiglu-limit", limited(Activation::swiglu, 0.75f)},
          {"swiglu_clamp_after-limit", limited(Activation::swiglu_clamp_after, 0.5f)},
          {"swiglu_oai", Activation::swiglu_oai},
          {"swiglu_oai-alpha-limit", oai},
          {"situ_glu", Activation::situ_glu},
          {"situ_glu-scales", scaled(0.75f, 1.5f)},
          {"quick_geglu", Activation::quick_geglu},
          // No 16-bit type holds these limits.
          {"swiglu_clamp_after-odd-limit", limited(Activation::swiglu_clamp_after, 0.3f)},
          {"swiglu-odd-limit", limited(Activation::swiglu, 0.7f)}};
}

constexpr std::array kLayouts = {W1Layout::interleaved, W1Layout::concatenated, W1Layout::separate,
                                 W1Layout::transposed, W1Layout::transposed_interleaved};
constexpr std::array kTransposed = {W1Layout::transposed, W1Layout::transposed_interleaved};

bool is_transposed(W1Layout layout) { return std::ranges::count(kTransposed, layout) > 0; }

/// Is every layout, with a bias and without, tested with this kind? The others have one in turn.
bool is_crossed(Activation kind) {
  return kind == Activation::swiglu ||
         std::ranges::none_of(with_parameters(),
                              [&](const NamedActivation& a) { return a.spec.kind == kind; });
}

std::string case_name(const NamedActivation& activation, W1Layout layout, bool bias) {
  std::string name = "activation/" + activation.name;
  if (is_glu(activation.spec) || is_transposed(layout)) {
    name += std::string("-") + sonicmoe::name(layout);
  }
  return name + (bias ? "-bias" : "");
}

void add_activation(CaseList* list, const NamedActivation& activation, W1Layout layout, bool bias) {
  LayerDesc desc = usual();
  desc.experts.activation = activation.spec;
  desc.experts.w1_layout = layout;
  desc.experts.bias = bias;
  list->add(case_name(activation, layout, bias), desc);
}

/// The one case with transposed weights of a crossed kind, where there are few.
struct InTurn {
  explicit InTurn(Activation kind)
      : layout(is_glu(kind) ? kTransposed[static_cast<std::size_t>(kind) % 2]
                            : W1Layout::transposed),
        bias(static_cast<int>(kind) / 2 % 2 == 1) {}
  W1Layout layout;
  bool bias;
};

/// On CUDA, where tests are dear, kinds other than SwiGLU have few cases with transposed weights.
void add_activations(CaseList* list, bool every) {
  for (const Activation kind : activations()) {
    if (!is_crossed(kind)) continue;
    const InTurn turn(kind);
    for (const W1Layout layout : kLayouts) {
      // Without a gate there is no order.
      const bool ordered = layout != W1Layout::interleaved && layout != W1Layout::transposed;
      if (!is_glu(kind) && ordered) continue;
      for (const bool bias : {false, true}) {
        const bool few = !every && kind != Activation::swiglu && is_transposed(layout);
        if (few && (layout != turn.layout || bias != turn.bias)) continue;
        add_activation(list, {name(kind), kind}, layout, bias);
      }
    }
  }
}

/// On CUDA the biases come in turn, too.
void add_parameters(CaseList* list, bool every) {
  const std::vector<NamedActivation> all = with_parameters();
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const bool bias : {false, true}) {
      if (every || bias == (i % 2 == 0)) {
        add_activation(list, all[i], kLayouts[i % std::size(kLayouts)], bias);
      }
    }
  }
}

struct Mode {
  const char* name;
  RouterOrder router;
  bool norm;
};
constexpr std::array kModes = {
    Mode{"softmax_over_topk", RouterOrder::select_then_score, false},
    Mode{"topk_over_softmax", RouterOrder::score_then_select, false},
    Mode{"topk_over_softmax_norm", RouterOrder::score_then_select, true}};

struct Kind {
  const char* name;
  RoutingKind kind;
};

void add_routers(CaseList* list) {
  for (const Mode& mode : kModes) {
    const auto desc_of = [&](LayerDesc desc) {
      desc.router.order = mode.router;
      desc.router.renormalize = mode.norm;
      return desc;
    };
    const std::string name = std::string("router/") + mode.name;
    list->add(name + "-dlogits", desc_of(shape(61, 72, 40, 7, 3)), RoutingKind::random, true);
    LayerDesc biased = desc_of(shape(61, 72, 40, 7, 3));
    biased.experts.bias = true;
    list->add(name + "-bias", biased, RoutingKind::random, true);
    for (const Kind& kind :
         {Kind{"ties", RoutingKind::ties}, Kind{"all_equal", RoutingKind::all_equal},
          Kind{"empty_ends", RoutingKind::empty_ends},
          Kind{"one_expert", RoutingKind::one_expert}}) {
      list->add(name + "-" + kind.name, desc_of(shape(61, 72, 40, 9, 2)), kind.kind, true);
    }
    list->add(name + "-e1", desc_of(shape(33, 24, 16, 1, 1)));
    list->add(name + "-k_is_e", desc_of(shape(33, 24, 16, 5, 5)));
    list->add(name + "-e40_k8", desc_of(shape(50, 24, 16, 40, 8)));
    list->add(name + "-t0", desc_of(shape(0, 24, 16, 5, 2)), RoutingKind::random, true);
    list->add(name + "-t1", desc_of(shape(1, 24, 16, 33, 3)));
  }
}

void add_shapes(CaseList* list) {
  // K = E sends every token to every expert, K = 1 with one expert all rows to one: both put the
  // counts at a tile's edge.
  for (const std::int64_t T : {127, 128, 129}) {
    const std::string tokens = "shape/t" + std::to_string(T);
    list->add(tokens + "-all_experts", shape(T, 24, 16, 2, 2));
    list->add(tokens + "-one_expert", shape(T, 24, 16, 9, 1), RoutingKind::one_expert);
  }
  list->add("shape/smallest", shape(3, 8, 8, 2, 1));
  // More than two cache blocks of the CPU along each axis.
  list->add("shape/wide", shape(20, 1032, 8, 4, 2));
  list->add("shape/deep", shape(20, 8, 1032, 4, 2));
  list->add("shape/long", shape(1045, 24, 16, 3, 1), RoutingKind::one_expert);
  list->add("shape/empty_ends", shape(100, 72, 40, 33, 4), RoutingKind::empty_ends);
  list->add("shape/large", shape(512, 128, 136, 16, 4));
  list->add("shape/wide-transposed", with(shape(20, 1032, 8, 4, 2), W1Layout::transposed));
  list->add("shape/deep-transposed_interleaved",
            with(shape(20, 8, 1032, 4, 2), W1Layout::transposed_interleaved));
  LayerDesc inference = usual();
  inference.experts.inference = true;
  list->add("inference/topk", inference);
  for (const W1Layout layout : kTransposed) {
    list->add(std::string("inference/") + name(layout), with(inference, layout));
  }
  inference.experts.bias = true;
  inference.experts.activation = Activation::relu_sq;
  list->add("inference/bias", inference);
  LayerDesc given = list_shape(40, 6, 90);
  given.experts.inference = true;
  list->add("inference/given", given, RoutingKind::hostile);
}

void add_lists(CaseList* list) {
  std::int64_t tile_rows = 0;
  for (const int count : kTileCounts) tile_rows += count;
  for (const bool sorted : {false, true}) {
    const auto add = [&](const std::string& name, LayerDesc desc, RoutingKind kind) {
      desc.router.assume_sorted = sorted;
      list->add("given/" + name + (sorted ? "-sorted" : ""), desc, kind);
    };
    add("random", list_shape(40, 7, 95), RoutingKind::random);
    add("hostile", list_shape(40, 7, 150), RoutingKind::hostile);
    add("empty_ends", list_shape(40, 9, 95), RoutingKind::empty_ends);
    add("one_expert", list_shape(40, 9, 70), RoutingKind::one_expert);
    add("tile_counts", list_shape(300, 8, tile_rows), RoutingKind::tile_counts);
    add("sentinels_only", list_shape(10, 3, 20), RoutingKind::sentinels_only);
    add("one_row", list_shape(10, 3, 1), RoutingKind::random);
    add("no_rows", list_shape(10, 3, 0), RoutingKind::random);
    add("no_tokens", list_shape(0, 3, 0), RoutingKind::random);
    add("one_token", list_shape(1, 5, 40), RoutingKind::hostile);
  }
  LayerDesc desc = list_shape(40, 7, 150);
  desc.experts.bias = true;
  for (const Activation activation : {Activation::swiglu, Activation::gelu}) {
    desc.experts.activation = activation;
    list->add(std::string("given/hostile-bias-") + name(activation),
              with(desc, W1Layout::concatenated), RoutingKind::hostile);
  }
  desc.experts.activation = Activation::swiglu;
  for (const W1Layout layout : kTransposed) {
    list->add(std::string("given/hostile-bias-") + name(layout), with(desc, layout),
              RoutingKind::hostile);
  }
}

/// The experts alone, on contiguous rows.
void add_rows(CaseList* list) {
  const auto rows_of = [](std::int64_t rows, std::int64_t experts, ScoreAt score_at) {
    LayerDesc desc = list_shape(rows, experts, rows);
    desc.experts.row_source = RowSource::contiguous;
    desc.experts.score_at = score_at;
    return desc;
  };
  constexpr std::array kScores = {ScoreAt::none, ScoreAt::before_down, ScoreAt::after_down};
  for (const ScoreAt score_at : kScores) {
    LayerDesc desc = rows_of(150, 7, score_at);
    const std::string name = std::string("rows/") + sonicmoe::name(score_at);
    list->add(name, desc);
    desc.experts.bias = true;
    desc.experts.zero_tail = true;
    desc.experts.index_type = IndexType::i64;
    list->add(name + "-bias-hostile", desc, RoutingKind::hostile);
  }
  LayerDesc desc = rows_of(1153, 8, ScoreAt::after_down);
  list->add("rows/tile_counts", desc, RoutingKind::tile_counts);
  desc.experts.bias = true;
  desc.experts.expected_rows = 64;
  for (const W1Layout layout : {W1Layout::separate, W1Layout::transposed_interleaved}) {
    list->add(std::string("rows/") + name(layout) + "-bias-tile_counts", with(desc, layout),
              RoutingKind::tile_counts);
  }
  desc = with(rows_of(150, 7, ScoreAt::before_down), W1Layout::transposed);
  desc.experts.zero_tail = true;
  list->add("rows/transposed-hostile", desc, RoutingKind::hostile);
  desc = rows_of(120, 9, ScoreAt::before_down);
  desc.experts.activation = Activation::relu_sq;
  list->add("rows/relu_sq-empty_ends", desc, RoutingKind::empty_ends);
  list->add("rows/relu_sq-transposed-empty_ends", with(desc, W1Layout::transposed),
            RoutingKind::empty_ends);
  desc.experts.zero_tail = true;
  list->add("rows/one_expert", desc, RoutingKind::one_expert);
  list->add("rows/idle", desc, RoutingKind::sentinels_only);
  list->add("rows/no_rows", rows_of(0, 3, ScoreAt::after_down));
  list->add("rows/one_row", rows_of(1, 4, ScoreAt::none));
  for (const std::int64_t experts : {288, 384, 896}) {
    desc = rows_of(300, experts, ScoreAt::none);
    desc.experts.zero_tail = true;
    desc.experts.hidden = 16;
    desc.experts.intermediate = 8;
    list->add("rows/e" + std::to_string(experts), desc, RoutingKind::hostile);
  }
  desc = rows_of(60, 5, ScoreAt::after_down);
  desc.experts.inference = true;
  list->add("rows/inference", desc, RoutingKind::hostile);
}

void add_rounding(CaseList* list) {
  constexpr std::array kRules = {
      RoundingRule::nearest, RoundingRule::stochastic, RoundingRule::nearest_scores,
      RoundingRule::balance, RoundingRule::up,         RoundingRule::down};
  const auto rounded = [](LayerDesc desc, RoundingRule rule, std::int64_t tile) {
    desc.rounding.rule = rule;
    desc.rounding.tile = tile;
    return desc;
  };
  for (std::size_t i = 0; i < kRules.size(); ++i) {
    const Mode& mode = kModes[i % kModes.size()];
    LayerDesc desc = rounded(shape(150, 72, 40, 7, 3), kRules[i], 16);
    desc.router.order = mode.router;
    desc.router.renormalize = mode.norm;
    desc.experts.bias = i >= kModes.size();
    list->add(std::string("rounding/") + sonicmoe::name(kRules[i]) + "-" + mode.name, desc,
              RoutingKind::random, true);
  }
  const auto nearest = [&](LayerDesc desc, std::int64_t tile) {
    return rounded(desc, RoundingRule::nearest, tile);
  };
  list->add("rounding/tile1", nearest(usual(), 1));
  list->add("rounding/tile128", nearest(shape(300, 24, 16, 5, 2), 128));
  list->add("rounding/ties", nearest(shape(61, 24, 16, 9, 2), 8), RoutingKind::ties);
  list->add("rounding/all_equal", nearest(shape(61, 24, 16, 9, 2), 8), RoutingKind::all_equal);
  // 33 tokens are no whole number of tiles, and there is no token to add.
  list->add("rounding/clamped", rounded(shape(33, 24, 16, 4, 1), RoundingRule::up, 32),
            RoutingKind::one_expert);
  list->add("rounding/no_rows", rounded(shape(33, 24, 16, 4, 2), RoundingRule::down, 1024));
  list->add("rounding/one_token", rounded(shape(1, 24, 16, 33, 3), RoundingRule::up, 1));
  list->add("rounding/no_tokens", nearest(shape(0, 24, 16, 5, 2), 8));
  LayerDesc inference = nearest(usual(), 8);
  inference.experts.inference = true;
  list->add("rounding/inference", inference);
  list->add("rounding/transposed_interleaved",
            with(nearest(usual(), 8), W1Layout::transposed_interleaved));
}

/// H made again in backward. tests/recompute_test.cpp has all other cases with it, too.
void add_recompute(CaseList* list) {
  const auto add = [&](const std::string& name, LayerDesc desc,
                       RoutingKind kind = RoutingKind::random) {
    desc.experts.recompute = Recompute::preact;
    list->add("recompute/" + name, desc, kind);
  };
  LayerDesc biased = usual();
  biased.experts.bias = true;
  for (const W1Layout layout : kLayouts)
    add(name(layout) + std::string("-bias"), with(biased, layout));
  biased.experts.activation = Activation::relu_sq;
  add("relu_sq-bias", biased);
  add("given-hostile", list_shape(40, 7, 150), RoutingKind::hostile);
  add("t0", shape(0, 24, 16, 5, 2));
  LayerDesc rounded = shape(150, 24, 16, 7, 3);
  rounded.rounding.tile = 16;
  add("rounding", rounded);
  LayerDesc rows = list_shape(150, 7, 150);
  rows.experts.row_source = RowSource::contiguous;
  rows.experts.score_at = ScoreAt::before_down;
  rows.experts.bias = rows.experts.zero_tail = true;
  add("rows-bias-hostile", rows, RoutingKind::hostile);
}

/// The tiles of CUDA kernels are 64 to 256 wide. Widths that models have, and none divides; a whole
/// number of tiles; a K loop longer than the pipeline; more tiles than multiprocessors.
void add_tiles(CaseList* list) {
  for (const std::int64_t n : {176, 704, 1408, 1856, 2880}) {
    list->add("tiles/n" + std::to_string(n), shape(150, 264, n, 5, 2));
  }
  list->add("tiles/e60", shape(400, 264, 104, 60, 4));
  // More tokens than CUDA sums at a time: where the router has a part, a warp serves several.
  list->add("sums/topk", shape(1024, 1032, 8, 8, 2));
  LayerDesc lists = list_shape(1024, 2, 2048);  // some tokens have no slot
  lists.experts.hidden = 256;
  lists.experts.intermediate = 8;
  list->add("sums/given", lists, RoutingKind::hostile);
  lists.tokens = 64;  // more slots than are looked up at once, rows longer than a block's part
  lists.experts.hidden = 2064;
  list->add("sums/wide", lists, RoutingKind::hostile);
  list->add("tiles/e512", shape(300, 72, 40, 512, 10));
  list->add("tiles/d2880", shape(100, 2880, 72, 4, 2));
  list->add("tiles/whole", shape(512, 512, 256, 4, 2));
  list->add("tiles/many", shape(3000, 1032, 72, 6, 3));
  list->add("tiles/long", shape(2000, 136, 264, 3, 2), RoutingKind::one_expert);
  LayerDesc gpt = shape(130, 360, 360, 8, 4);
  gpt.experts.bias = true;
  list->add("tiles/bias", gpt);
  LayerDesc some = shape(300, 328, 456, 5, 2);
  list->add("tiles/separate", with(some, W1Layout::separate));
  list->add("tiles/transposed", with(some, W1Layout::transposed));
  some.experts.bias = true;
  list->add("tiles/transposed_interleaved-bias", with(some, W1Layout::transposed_interleaved));
  some.experts.bias = false;
  some.experts.activation = Activation::relu_sq;
  list->add("tiles/relu_sq", some);
  list->add("tiles/relu_sq-transposed", with(some, W1Layout::transposed));
}

/// What the caller hands over in place of a router.
class InputCases {
 public:
  explicit InputCases(CaseList* list) : list_(list) {}

  /// Both backends run these.
  void add_usual() {
    const LayerDesc some = shape(61, 72, 40, 7, 3);
    add("softmax_over_topk-dlogits", with(some, RouterInput::logits, kModes[0]),
        RoutingKind::random, true);
    add("topk_over_softmax", with(some, RouterInput::logits, kModes[1]), RoutingKind::ties);
    LayerDesc rounded = with(shape(150, 24, 16, 7, 3), RouterInput::logits, kModes[1]);
    rounded.rounding.tile = 16;
    add("rounding", rounded, RoutingKind::random, true);
    for (const Mode& mode : kModes) {
      add(mode.name + std::string("-hostile"), with(some, RouterInput::logits_and_ids, mode),
          RoutingKind::hostile, mode.router == RouterOrder::score_then_select);
    }
    add("e896_k10", with(shape(40, 24, 16, 896, 10), RouterInput::logits_and_ids, kModes[1]));
    LayerDesc biased = weighted(some);
    biased.experts.bias = true;
    add("hostile-bias", biased, RoutingKind::hostile);
    add("e512_k22", weighted(shape(40, 24, 16, 512, 22)));
    add("sentinels_only", weighted(some), RoutingKind::sentinels_only);
    for (const std::int64_t rows : {1, 60, 150}) {
      biased.max_rows = rows;
      add("max_rows" + std::to_string(rows), biased, RoutingKind::hostile);
    }
  }

  /// The CPU runs these besides.
  void add_others() {
    const LayerDesc some = shape(61, 72, 40, 7, 3);
    add("topk_over_softmax_norm", with(some, RouterInput::logits, kModes[2]),
        RoutingKind::all_equal, true);
    for (const RouterInput input : {RouterInput::logits_and_ids, RouterInput::ids_and_weights}) {
      const auto each = [&](const char* name, const LayerDesc& desc,
                            RoutingKind kind = RoutingKind::random) {
        add(name, with(desc, input, kModes[0]), kind);
      };
      each("one_expert", some, RoutingKind::one_expert);
      each("empty_ends", shape(61, 72, 40, 9, 2), RoutingKind::empty_ends);
      each("k1", shape(33, 24, 16, 5, 1), RoutingKind::hostile);
      each("k_is_e", shape(33, 24, 16, 5, 5));
      each("e1", shape(33, 24, 16, 1, 1));
      each("e288_k1", shape(40, 24, 16, 288, 1));
      each("e384_k10", shape(40, 24, 16, 384, 10));
      each("t0", shape(0, 24, 16, 5, 2));
      LayerDesc inference = some;
      inference.experts.inference = true;
      each("inference", inference, RoutingKind::hostile);
    }
    add("e512_k22", with(shape(40, 24, 16, 512, 22), RouterInput::logits_and_ids, kModes[2]));
    add("sentinels_only", with(some, RouterInput::logits_and_ids, kModes[2]),
        RoutingKind::sentinels_only, true);
    add("e896_k10", weighted(shape(40, 24, 16, 896, 10)));
  }

 private:
  static LayerDesc with(LayerDesc desc, RouterInput input, const Mode& mode) {
    desc.router.input = input;
    desc.router.order = mode.router;
    desc.router.renormalize = mode.norm;
    return desc;
  }
  static LayerDesc weighted(const LayerDesc& desc) {
    return with(desc, RouterInput::ids_and_weights, kModes[0]);
  }
  void add(const std::string& name, const LayerDesc& desc, RoutingKind kind = RoutingKind::random,
           bool outside_dlogits = false) {
    list_->add("input/" + std::string(sonicmoe::name(desc.router.input)) + "-" + name, desc, kind,
               outside_dlogits);
  }
  CaseList* list_;
};

const std::set<std::string> kSmoke = {"activation/swiglu-interleaved/f32",
                                      "activation/swiglu-interleaved/bf16",
                                      "activation/swiglu-transposed_interleaved-bias/bf16",
                                      "given/hostile-bias-transposed/f32",
                                      "activation/geglu-separate-bias/f32",
                                      "activation/relu_sq-bias/bf16",
                                      "router/topk_over_softmax-dlogits/f32",
                                      "router/topk_over_softmax_norm-ties/bf16",
                                      "router/softmax_over_topk-empty_ends/f32",
                                      "router/deepseek_v3-dlogits/f32",
                                      "router/deepseek_v3-f32_router/bf16",
                                      "shape/t129-one_expert/bf16",
                                      "shape/large/bf16",
                                      "given/hostile/f32",
                                      "given/hostile-bias-swiglu/bf16",
                                      "input/logits-softmax_over_topk-dlogits/f32",
                                      "input/logits_and_ids-topk_over_softmax-hostile/f32",
                                      "input/ids_and_weights-hostile-bias/bf16",
                                      "rows/after_down-bias-hostile/bf16",
                                      "rows/none/f32",
                                      "inference/topk/f32",
                                      "rounding/nearest-softmax_over_topk/f32",
                                      "rounding/stochastic-topk_over_softmax/bf16",
                                      "rounding/balance-softmax_over_topk/bf16",
                                      "recompute/separate-bias/f32",
                                      "recompute/rows-bias-hostile/bf16"};

void add_all(CaseList* list, bool every) {
  add_activations(list, every);
  add_routers(list);
  add_scored_routers(list);
  add_shapes(list);
  add_lists(list);
  add_rows(list);
  add_rounding(list);
}

}  // namespace

std::vector<NamedActivation> tested_activations() {
  std::vector<NamedActivation> all;
  for (const Activation kind : activations()) all.push_back({name(kind), kind});
  for (const NamedActivation& activation : with_parameters()) {
    if (activation.spec != ActivationSpec(activation.spec.kind)) all.push_back(activation);
  }
  return all;
}

std::vector<ActivationSpec> exact_activations() {
  std::vector<ActivationSpec> all;
  for (const Activation kind : activations()) {
    // The defaults of these saturate nowhere.
    if (kind != Activation::swiglu_oai && kind != Activation::situ_glu) all.emplace_back(kind);
  }
  all.push_back(limited(Activation::swiglu, 48));
  all.push_back(limited(Activation::swiglu_clamp_after, 48));
  all.push_back(limited(Activation::swiglu_oai, 32));
  all.back().alpha = 2;
  all.push_back(scaled(1, 1 / 32.0f));
  return all;
}

std::vector<std::string> activation_case_names() {
  std::vector<std::string> names;
  for (const Activation kind : activations()) {
    if (kind == Activation::swiglu || !is_crossed(kind)) continue;
    const InTurn turn(kind);
    names.push_back(
        case_name({name(kind), kind}, kLayouts[static_cast<std::size_t>(kind) % 3], false));
    names.push_back(case_name({name(kind), kind}, turn.layout, turn.bias));
  }
  const std::vector<NamedActivation> others = with_parameters();
  for (std::size_t i = 0; i < others.size(); ++i) {
    names.push_back(case_name(others[i], kLayouts[i % std::size(kLayouts)], i % 2 == 0));
  }
  return names;
}

std::vector<Case> full_cases() {
  CaseList list;
  add_all(&list, true);
  InputCases inputs(&list);
  inputs.add_usual();
  inputs.add_others();
  add_parameters(&list, true);
  add_recompute(&list);
  return list.take();
}

std::vector<Case> cuda_cases() {
  CaseList list(DType::f16, DType::bf16);
  add_all(&list, false);
  add_tiles(&list);
  InputCases(&list).add_usual();
  add_parameters(&list, false);
  add_recompute(&list);
  return list.take();
}

std::vector<Case> full_cases(Device device) {
  return device.type == DeviceType::cpu ? full_cases() : cuda_cases();
}

std::vector<Case> smoke_cases(Device device) {
  if (device.type == DeviceType::cpu) return smoke_cases();
  std::vector<Case> cases = cuda_cases();
  std::erase_if(cases, [](const Case& c) {
    const std::string stem = c.name.substr(0, c.name.rfind('/'));
    return !kSmoke.contains(stem + (c.desc.experts.dtype == DType::f16 ? "/f32" : "/bf16"));
  });
  return cases;
}

std::vector<Case> smoke_cases() {
  std::vector<Case> cases = full_cases();
  std::erase_if(cases, [](const Case& c) { return !kSmoke.contains(c.name); });
  return cases;
}

std::vector<Case> benchmark_cases() {
  struct Row {
    const char* name;
    std::int64_t T, d, n, E, K;
  };
  constexpr Row kRows[] = {{"1.4B-n256", 40960, 768, 256, 128, 8},
                           {"1.4B-n512", 40960, 768, 512, 64, 4},
                           {"1.4B-n1024", 40960, 768, 1024, 32, 2},
                           {"7B-n256", 24576, 1536, 256, 128, 8},
                           {"7B-n512", 24576, 1536, 512, 64, 4},
                           {"7B-n1024", 24576, 1536, 1024, 32, 2},
                           {"30B-n256", 32768, 4096, 256, 256, 16},
                           {"30B-n512", 32768, 4096, 512, 128, 8},
                           {"30B-n1024", 32768, 4096, 1024, 64, 4},
                           {"120B-n512", 32768, 4096, 512, 256, 16},
                           {"120B-n1024", 32768, 4096, 1024, 128, 8},
                           {"120B-n2048", 32768, 4096, 2048, 64, 4},
                           {"cpu", 4096, 512, 256, 32, 4}};
  std::vector<Case> cases;
  for (const Row& row : kRows) {
    Case c;
    c.name = row.name;
    c.desc = shape(row.T, row.d, row.n, row.E, row.K);
    c.scale = Scale::benchmark;
    cases.push_back(std::move(c));
  }
  return cases;
}

const Case* find_case(const std::string& name) {
  static const std::vector<Case> all = [] {
    std::vector<Case> cases = full_cases();
    for (Case& c : cuda_cases()) {
      const bool listed =
          std::ranges::any_of(cases, [&](const Case& l) { return l.name == c.name; });
      if (!listed) cases.push_back(std::move(c));
    }
    for (Case& c : benchmark_cases()) cases.push_back(std::move(c));
    return cases;
  }();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Case& c) { return c.name == name; });
  return found == all.end() ? nullptr : &*found;
}

Case as_rows(const Case& test_case, ScoreAt score_at) {
  Case c = test_case;
  const std::int64_t rows = c.desc.rows();
  c.name = "custom";
  c.outside_dlogits = false;
  c.desc.tokens = rows;
  c.desc.rounding = {};
  c.desc.router = {
      .experts = c.desc.router.experts, .input = RouterInput::lists, .list_length = rows};
  c.desc.experts.row_source = RowSource::contiguous;
  c.desc.experts.score_at = score_at;
  return c;
}

Case custom_case(const LayerDesc& desc, std::uint64_t seed) {
  Case c;
  c.name = "custom";
  c.desc = desc;
  if (!desc.experts.gathers()) {  // lists name the owner of each row
    c.desc.router = {
        .experts = desc.router.experts, .input = RouterInput::lists, .list_length = desc.tokens};
  }
  c.seed = seed;
  return c;
}

std::string layer_option(const LayerDesc& desc) { return "--layer '" + to_string(desc) + "'"; }

std::string repro_command(const Case& c, int threads, Device device) {
  std::string line = "sonicmoe check";
  if (c.name != "custom") {
    line += " --case " + c.name;
  } else {
    line += " " + layer_option(c.desc) + " --seed " + std::to_string(c.seed);
  }
  if (device.type == DeviceType::cuda) line += " --device cuda";
  if (threads > 0) line += " --threads " + std::to_string(threads);
  return line;
}

}  // namespace sonicmoe::testkit
