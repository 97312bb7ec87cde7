#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sonicmoe/layer.h"

/// The one list of cases that drives tests, `sonicmoe check` and `sonicmoe bench`.
namespace sonicmoe::testkit {

/// Which experts the tokens of a case go to.
enum class RoutingKind {
  random,
  ties,            ///< every two neighbouring experts have the same router weights
  all_equal,       ///< router weights are zero: all logits tie
  empty_ends,      ///< first, middle and last experts get no rows (where E and K allow it)
  one_expert,      ///< the last expert is every token's first choice; lists and ids: its only one
  tile_counts,     ///< lists: experts with 127, 128, 129, 0, 1, 255, 256, 257 rows, in turn
  hostile,         ///< lists and ids: sentinels, duplicates, tokens without expert
  sentinels_only,  ///< lists and ids: no rows at all
};

enum class Scale {
  unit,       ///< x, dO, H and A of size one: biases matter, activations are past their linear part
  benchmark,  ///< x and dO 0.2 randn, weights 0.02 randn
};

struct Case {
  std::string name;
  LayerDesc desc;
  RoutingKind routing = RoutingKind::random;
  Scale scale = Scale::unit;
  bool outside_dlogits = false;  ///< backward is given a dlogits
  std::uint64_t seed = 1;
};

/// An activation, and what the names of its cases call it.
struct NamedActivation {
  std::string name;
  ActivationSpec spec;
};
/// Activations for numbers of size one: every kind with its defaults, then kinds with parameters
/// that such numbers notice.
std::vector<NamedActivation> tested_activations();
/// Activations whose values and slopes are exact for integer_inputs(): kinds with their defaults,
/// and with a limit, an alpha or scales at which these inputs saturate.
std::vector<ActivationSpec> exact_activations();
/// Listed cases of every tested activation but SwiGLU, the layouts in turn: of kinds without
/// parameters one with transposed weights besides. Names without the type.
std::vector<std::string> activation_case_names();

/// A few cases of every kind, for a quick look; part of full_cases().
std::vector<Case> smoke_cases();
/// Every case that tests run on the CPU.
std::vector<Case> full_cases();
/// The same for CUDA: in bf16 and f16, and shapes that its tiles do not divide.
std::vector<Case> cuda_cases();
/// smoke_cases() and full_cases() of a device, in its own types.
std::vector<Case> smoke_cases(Device device);
std::vector<Case> full_cases(Device device);
/// The twelve shapes of published tables and the one shape for the CPU ("cpu"), bf16 SwiGLU.
std::vector<Case> benchmark_cases();

/// A case of any of the lists above by its name; nullptr if there is none.
const Case* find_case(const std::string& name);
/// The experts of a case alone, on contiguous rows whose scores enter at `score_at`; "custom".
Case as_rows(const Case& test_case, ScoreAt score_at);
/// A random routing of the caller's shape, named "custom". With contiguous rows there are `tokens`
/// of them, and nothing else of the router counts than its experts.
Case custom_case(const LayerDesc& desc, std::uint64_t seed);

/// The command that runs this case again:
///   sonicmoe check --case NAME                                for a listed case
///   sonicmoe check --layer 'tokens=...' --seed ...            for a custom one
/// with `--threads N` if N > 0 and `--device cuda` if so. `sonicmoe check --list_cases` prints the
/// names. `--case` carries everything but device and threads, and so excludes --thiek and the
/// options of the layer.
std::string repro_command(const Case& test_case, int threads = 0, Device device = {});
/// "--layer 'tokens=64 hidden=64 ...'", for the shell.
std::string layer_option(const LayerDesc& desc);

}  // namespace sonicmoe::testkit
