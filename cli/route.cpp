#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "buffer.h"
#include "interrupt.h"
#include "logits.h"
#include "parsing.h"
#include "subcommands.h"

namespace sonicmoe::cli {
namespace {

constexpr const char* kDefaultShape = "4096,512,256,32,4";

constexpr const char* kHelp =
    "Routes logits by plain top-K and by each rule of token rounding, and prints a line for each.\n"
    "rows: entries routed. padded: rows that filling every expert's last tile would add. dropped,\n"
    "added: entries of plain top-K that are gone, and new ones. up, down: experts rounded that "
    "way;\n"
    "clamped: experts that could only go down, because there are too few tokens. largest, total:\n"
    "largest and summed deviation of the experts' rows. mass lost: share of plain top-K's summed\n"
    "scores that the dropped entries had.\n"
    "Rules: nearest (NR-f), stochastic (SR-f), nearest_scores (NR-s), balance (Balance-f), up,\n"
    "down. Draws are a function of --seed and --offset alone.\n"
    "FILE holds a (T, E) array of float32 in C order: .npy of version 1, or the little-endian\n"
    "numbers alone with their shape in --te. Without --logits: a random router, standard normal\n"
    "logits; of --thiek only T, E and K matter then.\n"
    "JSON: version, command, device, threads, logits, skew, seed, offset, tokens, experts, top_k,\n"
    "dtype, router, renormalize, tile, interrupted, results [{rule, rows, padded, dropped,\n"
    "added, up, down, clamped, largest, total, mass_lost, counts}]. The first rule is top_k, "
    "plain\n"
    "routing; counts are rows of each expert; logits is null for the random router.";

struct RouteSettings : Settings {
  std::string logits, te;
  double skew = 0;
  std::string rule = "all";
  std::uint64_t offset = 0;
  bool counts = false;

  std::string line() const {
    std::string line = thiek_line();
    if (skew != 0) line += " --skew " + Json(skew).dump();
    if (!logits.empty()) {
      line = "--logits " + logits + (te.empty() ? "" : " --te " + te) + " --top_k " +
             std::to_string(desc.router.top_k);
    }
    return line + " --dtype " + name(desc.experts.dtype) + router_line() + " --tile " +
           std::to_string(tile) + device_line();
  }
};

using Counts = std::vector<std::int32_t>;

/// How one way of routing differs from plain top-K.
struct Outcome {
  std::string rule;
  Counts counts;
  std::int64_t rows = 0, padded = 0, dropped = 0, added = 0;
  std::int64_t up = 0, down = 0, clamped = 0, largest = 0, total = 0;
  double mass_lost = 0;
};

/// One matrix of logits, routed in several ways.
class Comparison {
 public:
  /// Reads or draws the logits and routes them by plain top-K; fills in T and E of `settings`.
  explicit Comparison(RouteSettings* settings) : settings_(*settings), desc_(settings->desc) {
    std::optional<Logits> logits;
    if (!settings->logits.empty()) {
      logits = read_logits(settings->logits, settings->te);
      settings->desc.tokens = logits->tokens;
      settings->desc.router.experts = logits->experts;
    }
    const TopKDesc top_k{{desc_.router}, desc_.tokens, desc_.experts.dtype};
    const auto plan = settings_.plan(top_k, settings_.line());  // refuses what cannot be allocated
    if (!logits) {
      logits = random_logits(desc_.tokens, desc_.router.experts, settings_.skew, settings_.seed);
    }
    const auto bytes = testkit::encode(logits->values, desc_.experts.dtype);
    logits_ = Buffer(bytes.size(), settings_.device);
    logits_.upload(bytes.data(), bytes.size());

    const std::int64_t slots = desc_.tokens * desc_.router.top_k;
    const Buffer scores = words(slots), ids = words(slots);
    run(plan,
        {.logits = logits_.data(), .scores = scores.as<float>(), .ids = ids.as<std::int32_t>()});
    scores_ = scores.contents<float>();
    ids_ = ids.contents<std::int32_t>();
    frequency_.resize(static_cast<std::size_t>(desc_.router.experts));
    for (const std::int32_t id : ids_) ++frequency_[static_cast<std::size_t>(id)];
  }

  Outcome top_k() const { return count("top_k", frequency_); }

  Outcome round(RoundingRule rule) const {
    const TokenRoundingDesc rounding{
        {desc_.router}, desc_.tokens, desc_.experts.dtype, rule, settings_.tile};
    const auto plan = settings_.plan(rounding, settings_.line());
    const Buffer scores = words(rounding.capacity()), tokens = words(rounding.capacity());
    const Buffer experts = words(rounding.capacity()), counts = words(desc_.router.experts);
    run(plan, {.logits = logits_.data(),
               .seed = settings_.seed,
               .offset = settings_.offset,
               .scores = scores.as<float>(),
               .token_ids = tokens.as<std::int32_t>(),
               .expert_ids = experts.as<std::int32_t>(),
               .counts = counts.as<std::int32_t>()});
    Outcome out = count(name(rule), counts.contents<std::int32_t>());
    const auto expert_ids = experts.contents<std::int32_t>();
    const auto token_ids = tokens.contents<std::int32_t>();
    // The entries themselves say what was dropped and added, not the counts.
    std::vector<bool> kept(static_cast<std::size_t>(desc_.tokens * desc_.router.top_k));
    out.rows = 0;
    for (std::size_t i = 0; i < expert_ids.size(); ++i) {
      const std::int32_t expert = expert_ids[i];
      if (expert >= desc_.router.experts) continue;
      ++out.rows;
      const std::int64_t first = token_ids[i] * desc_.router.top_k;
      std::int64_t slot = first;
      while (slot < first + desc_.router.top_k && ids_[static_cast<std::size_t>(slot)] != expert)
        ++slot;
      if (slot == first + desc_.router.top_k) {
        ++out.added;
      } else {
        kept[static_cast<std::size_t>(slot)] = true;
      }
    }
    double mass = 0, lost = 0;
    for (std::size_t slot = 0; slot < kept.size(); ++slot) {
      const double score = scores_[slot];
      mass += score;
      if (kept[slot]) continue;
      ++out.dropped;
      lost += score;
    }
    out.mass_lost = mass > 0 ? lost / mass : 0;
    return out;
  }

 private:
  Buffer words(std::int64_t count) const {
    return make_tensor(count, DType::f32, settings_.device);
  }

  template <class Desc>
  void run(const OpPlan<Desc>& plan, const typename Desc::Args& args) const {
    const Buffer workspace(plan.workspace_bytes(), settings_.device);
    const Status status = plan.run(args, workspace.workspace());
    if (!status.ok()) throw UsageError(settings_.line() + ": " + status.message());
  }

  /// What follows from rows per expert.
  Outcome count(const char* rule, const Counts& counts) const {
    Outcome out;
    out.rule = rule;
    out.counts = counts;
    const std::int64_t tile = settings_.tile;
    for (std::size_t e = 0; e < counts.size(); ++e) {
      const std::int64_t plain = frequency_[e], rows = counts[e], deviation = rows - plain;
      const std::int64_t filled = (plain + tile - 1) / tile * tile;
      out.rows += rows;
      out.padded += (rows + tile - 1) / tile * tile - rows;
      out.up += deviation > 0;
      out.down += deviation < 0;
      out.clamped += filled > plain && filled > desc_.tokens;
      out.largest = std::max(out.largest, std::abs(deviation));
      out.total += deviation;
    }
    return out;
  }

  const RouteSettings& settings_;
  const LayerDesc& desc_;
  Buffer logits_;              // (T, E)
  std::vector<float> scores_;  // (T, K)
  Counts ids_;                 // (T, K)
  Counts frequency_;           // (E)
};

void print(const Outcome& o) {
  std::printf("%-15s %9lld %9lld %9lld %9lld %5lld %5lld %8lld %8lld %8lld %8.3f %%\n",
              o.rule.c_str(), static_cast<long long>(o.rows), static_cast<long long>(o.padded),
              static_cast<long long>(o.dropped), static_cast<long long>(o.added),
              static_cast<long long>(o.up), static_cast<long long>(o.down),
              static_cast<long long>(o.clamped), static_cast<long long>(o.largest),
              static_cast<long long>(o.total), 100 * o.mass_lost);
}

void print_counts(const std::vector<Outcome>& outcomes) {
  constexpr int kWidth = 14;  // of the longest rule
  std::printf("\nrows   ");
  for (const auto& o : outcomes) std::printf(" %*s", kWidth, o.rule.c_str());
  for (std::size_t e = 0; e < outcomes.front().counts.size(); ++e) {
    std::printf("\n%-7zu", e);
    for (const auto& o : outcomes) std::printf(" %*d", kWidth, o.counts[e]);
  }
  std::printf("\n");
}

int run_route(RouteSettings& settings) {
  settings.resolve();
  const Comparison comparison(&settings);
  const LayerDesc& desc = settings.desc;
  std::vector<Outcome> outcomes = {comparison.top_k()};
  for (const auto& word : names<RoundingRule>()) {
    if (interrupted()) break;
    RoundingRule rule{};
    parse(word, &rule);
    RoundingRule wanted = rule;
    parse(settings.rule, &wanted);  // "all" names none, and leaves it
    if (rule == wanted) outcomes.push_back(comparison.round(rule));
  }

  std::printf("sonicmoe %s route %s --seed %llu --offset %llu --threads %d\n", version(),
              settings.line().c_str(), static_cast<unsigned long long>(settings.seed),
              static_cast<unsigned long long>(settings.offset), settings.threads);
  const double mean = static_cast<double>(desc.tokens * desc.router.top_k) /
                      static_cast<double>(desc.router.experts);
  std::printf("T %lld, E %lld, K %lld: %.1f rows an expert, %.2f tiles of %lld\n",
              static_cast<long long>(desc.tokens), static_cast<long long>(desc.router.experts),
              static_cast<long long>(desc.router.top_k), mean,
              mean / static_cast<double>(settings.tile), static_cast<long long>(settings.tile));
  std::printf("%-15s %9s %9s %9s %9s %5s %5s %8s %8s %8s %10s\n", "", "rows", "padded", "dropped",
              "added", "up", "down", "clamped", "largest", "total", "mass lost");
  Json results = Json::array();
  for (const auto& o : outcomes) {
    print(o);
    results.push_back({{"rule", o.rule},
                       {"rows", o.rows},
                       {"padded", o.padded},
                       {"dropped", o.dropped},
                       {"added", o.added},
                       {"up", o.up},
                       {"down", o.down},
                       {"clamped", o.clamped},
                       {"largest", o.largest},
                       {"total", o.total},
                       {"mass_lost", o.mass_lost},
                       {"counts", o.counts}});
  }
  if (settings.counts) print_counts(outcomes);
  write_json(settings.json, {{"version", version()},
                             {"command", "route"},
                             {"device", device_name(settings.device)},
                             {"threads", settings.threads},
                             {"logits", settings.logits.empty() ? Json() : Json(settings.logits)},
                             {"skew", settings.skew},
                             {"seed", settings.seed},
                             {"offset", settings.offset},
                             {"tokens", desc.tokens},
                             {"experts", desc.router.experts},
                             {"top_k", desc.router.top_k},
                             {"dtype", name(desc.experts.dtype)},
                             {"router", name(desc.router.order)},
                             {"renormalize", desc.router.renormalize},
                             {"tile", settings.tile},
                             {"interrupted", interrupted()},
                             {"results", results}});
  if (!interrupted()) return 0;
  std::printf("interrupted\n");
  return kInterruptedExit;
}

}  // namespace

Subcommand add_route(CLI::App& app) {
  auto* parser = app.add_subcommand("route", "What token rounding does to a router's choices");
  parser->footer(kHelp);
  auto settings = std::make_shared<RouteSettings>();
  auto* thiek = settings->add_thiek(*parser, kDefaultShape);
  auto* logits = parser->add_option("--logits", settings->logits, "Route these, not random ones")
                     ->check(file_name())
                     ->type_name("FILE")
                     ->excludes(thiek);
  const auto check_shape = [](std::string& text) {
    return parse_integers(text, 2) ? "" : "got '" + text + "', allowed: two integers T,E";
  };
  parser->add_option("--te", settings->te, "Of --logits: tokens, experts")
      ->check(CLI::Validator(check_shape, ""))
      ->type_name("T,E")
      ->needs(logits);
  auto* top_k =
      add_integer(*parser, "--top_k", settings->desc.router.top_k, 1,
                  std::numeric_limits<std::int32_t>::max(), "Of --logits: experts a token");
  top_k->needs(logits);
  logits->needs(top_k);
  add_skew(*parser, settings->skew, "Expert e's logits are this times ln(e + 1) lower (default: 0)")
      ->excludes(logits);
  settings->add_dtype(*parser);
  settings->add_router(*parser);
  std::vector<std::string> rules = {"all"};
  for (const auto& rule : names<RoundingRule>()) rules.push_back(rule);
  parser->add_option("--rule", settings->rule, "Default: all")
      ->check(rounding_rule("all"))
      ->type_name(join(rules));
  settings->add_tile(*parser);
  add_integer(*parser, "--offset", settings->offset, 0, kMaxSeed,
              "Of the draws: a step of training (default: 0)");
  parser->add_flag("--counts", settings->counts, "Print the rows of each expert, too")
      ->check(no_value());
  settings->add_run(*parser);
  return {parser, [settings] { return run_route(*settings); }};
}

}  // namespace sonicmoe::cli
