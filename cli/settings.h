#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sonicmoe/sonicmoe.h"

// Most of the program needs no more of CLI11, which takes a compiler 6 s; see parsing.h.
namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sonicmoe::cli {

using Json = nlohmann::ordered_json;

/// What the command line says is wrong, or what the library refuses: one line, exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Settings shared by the subcommands: which layer, where, and the report.
struct Settings {
  LayerDesc desc;
  Device device;
  int threads = 0;          ///< resolved to at least 1 before a subcommand runs
  int multiprocessors = 0;  ///< 0: all
  std::uint64_t seed = 0;
  std::string json;  ///< path of the report, or empty
  bool has_shape = false;

  /// Adds the shared options to a subcommand. A null `default_thiek` means that the subcommand also
  /// works without a shape; the options that describe a layer then need --thiek.
  void add_to(CLI::App& app, const char* default_thiek);
  /// Parts of it, for a subcommand that needs no whole layer: --thiek; --dtype;
  /// --topk_over_softmax and --norm_topk_probs; --tile; --device, --threads, --seed and --json.
  CLI::Option* add_thiek(CLI::App& app, const char* default_thiek);
  CLI::Option* add_dtype(CLI::App& app);
  std::vector<CLI::Option*> add_router(CLI::App& app);
  CLI::Option* add_tile(CLI::App& app);
  void add_run(CLI::App& app);
  /// Fills in what depends on several options. Refuses, now and not after minutes of work, a report
  /// that cannot be written.
  void resolve();

  Options options() const;
  /// The plan of `any`. A refusal becomes a UsageError that starts with the options to blame.
  template <class Desc>
  auto plan(const Desc& any, const std::string& blame) const {
    auto result = make_plan(any, device, options());
    if (!result.ok()) throw UsageError(blame + ": " + result.status().message());
    return std::move(result).value();
  }

  /// explain() of that plan, or of an ExpertsPlan where rows are contiguous: then `tokens` of them.
  std::string explain(const LayerDesc& layer, const std::string& blame) const {
    const ExpertsDesc& experts = layer.experts;
    if (experts.gathers()) return plan(layer, blame).explain();
    return plan(GroupedDesc{experts, 0, layer.tokens, layer.router.experts}, blame).explain();
  }

  /// The options that describe the layer: "--layer 'tokens=64 hidden=64 ...'".
  std::string layer_line() const;
  std::string thiek_line() const;   ///< "--thiek 64,64,64,8,2"
  std::string router_line() const;  ///< " --topk_over_softmax --norm_topk_probs", or less of it
  std::string device_line() const;  ///< " --device cuda --multiprocessors 100", or less of it
  std::string multiprocessors_line() const;
  Json layer_json() const;

  std::int64_t tile = 128;  ///< of token rounding, where it is asked for

 private:
  bool dtype_given_ = false;
  bool rounding_given_ = false;
};

inline constexpr std::int64_t kMaxSeed = std::int64_t{1} << 53;  // JSON's exact integers end there

/// "1,2,3" as `count` integers.
std::optional<std::vector<std::int64_t>> parse_integers(const std::string& text, std::size_t count);
/// `desc` with the options that a text in that form names.
LayerDesc with_options(const LayerDesc& desc, const std::string& text);
/// "a, b, c".
std::string join(const std::vector<std::string>& words);

/// The names of an enum whose values count up from 0.
template <class Enum>
std::vector<std::string> names() {
  std::vector<std::string> all;
  for (int i = 0; name(static_cast<Enum>(i)) != std::string("?"); ++i) {
    all.emplace_back(name(static_cast<Enum>(i)));
  }
  return all;
}

/// What devices() calls it.
std::string device_name(Device wanted);

/// JSON has no NaN and no infinity: null stands for them.
Json finite(double value);
void write_json(const std::string& path, const Json& report);

}  // namespace sonicmoe::cli
