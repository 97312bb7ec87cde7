#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "interrupt.h"
#include "parsing.h"
#include "progress.h"
#include "subcommands.h"
#include "testkit/cases.h"
#include "testkit/run.h"

namespace sonicmoe::cli {
namespace {

constexpr const char* kHelp =
    "Runs the layer, then each operation by itself, and compares every tensor with an fp64\n"
    "oracle that shares no code with the library. error and bound: Frobenius norms relative\n"
    "to the exact tensor, of its worst expert or block. The bound is twice the error of plain\n"
    "loops in the same precision. With --rounding, as_given: the same bits as the layer with\n"
    "its entries given as lists. Without --thiek and --case: a short list of cases of every\n"
    "kind.\n"
    "JSON: version, command, device, threads, multiprocessors (0: all), interrupted, passed,\n"
    "failed, cases [{name, repro, reports [{name, pass, failure, checks [{tensor, error,\n"
    "bound, pass, note}]}]}].";

struct CheckSettings : Settings {
  std::string case_name;
  bool list_cases = false;
  bool seed_given = false;
};

int list_cases(Device device) {
  for (const auto& item : testkit::full_cases(device)) std::printf("%s\n", item.name.c_str());
  return 0;
}

/// Layers that the library takes, and for which there is nothing to compare.
void check_comparable(const LayerDesc& desc) {
  if (desc.experts.accumulate_weight_grads) {
    throw UsageError(
        "--layer: got accumulate_weight_grads=true, allowed: false (there is nothing to add to)");
  }
  if (desc.router.takes_lists() && desc.tokens == 0 && desc.router.list_length > 0) {
    throw UsageError("--layer: got list_length=" + std::to_string(desc.router.list_length) +
                     ", allowed: 0 without tokens");
  }
}

std::vector<testkit::Case> chosen_cases(const CheckSettings& settings) {
  if (settings.has_shape) return {testkit::custom_case(settings.desc, settings.seed)};
  if (settings.case_name.empty()) return testkit::smoke_cases(settings.device);
  return {*testkit::find_case(settings.case_name)};
}

/// Prints the report and counts its tensors as passed or failed.
Json print_report(const testkit::Report& report, int* passed, int* failed) {
  Json checks = Json::array();
  if (!report.failure.empty()) {
    std::printf("  %s: %s FAIL\n", report.name.c_str(), report.failure.c_str());
    ++*failed;
  }
  for (const auto& check : report.checks) {
    std::printf("  %-16s %-13s error %.2e bound %.2e %s%s%s\n", report.name.c_str(),
                check.tensor.c_str(), check.error, check.bound, check.pass ? "PASS" : "FAIL",
                check.note.empty() ? "" : "  ", check.note.c_str());
    ++*(check.pass ? passed : failed);
    checks.push_back({{"tensor", check.tensor},
                      {"error", finite(check.error)},
                      {"bound", finite(check.bound)},
                      {"pass", check.pass},
                      {"note", check.note}});
  }
  return {{"name", report.name},
          {"pass", report.pass()},
          {"failure", report.failure},
          {"checks", checks}};
}

int run_check(CheckSettings& settings) {
  if (settings.list_cases) return list_cases(settings.device);
  settings.resolve();
  if (settings.has_shape) check_comparable(settings.desc);
  if (settings.seed_given && !settings.has_shape) {
    throw UsageError("--seed: got '" + std::to_string(settings.seed) +
                     "', allowed: only with --thiek or --layer");
  }
  const std::vector<testkit::Case> cases = chosen_cases(settings);
  // A case that the library refuses is a matter of options, not of wrong results.
  for (const auto& item : cases) {
    const std::string blame = "--case " + item.name + settings.device_line();
    settings.explain(item.desc, settings.has_shape ? settings.layer_line() : blame);
  }

  int passed = 0;
  int failed = 0;
  Json list = Json::array();
  const Progress progress;
  for (const auto& item : cases) {
    if (interrupted()) break;
    const int failed_before = failed;
    const std::string repro = testkit::repro_command(item, settings.threads, settings.device) +
                              settings.multiprocessors_line();
    Json reports = Json::array();
    std::printf("%s\n", settings.has_shape ? settings.layer_line().c_str() : item.name.c_str());
    const auto print_all = [&](const std::vector<testkit::Report>& all) {
      progress.clear();
      for (const auto& report : all) reports.push_back(print_report(report, &passed, &failed));
      std::fflush(stdout);
    };
    progress.show("checking the layer of " + item.name);
    print_all({testkit::check_layer(item, settings.device, settings.options())});
    if (!interrupted()) {
      progress.show("checking the operations of " + item.name);
      print_all(testkit::check_ops(item, settings.device, settings.options()));
    }
    if (failed > failed_before) std::printf("  to repeat: %s\n", repro.c_str());
    list.push_back({{"name", item.name}, {"repro", repro}, {"reports", reports}});
  }

  std::printf("%d passed, %d failed%s\n", passed, failed, interrupted() ? ", interrupted" : "");
  write_json(settings.json, {{"version", version()},
                             {"command", "check"},
                             {"device", device_name(settings.device)},
                             {"threads", settings.threads},
                             {"multiprocessors", settings.multiprocessors},
                             {"interrupted", interrupted()},
                             {"passed", passed},
                             {"failed", failed},
                             {"cases", list}});
  if (failed > 0) return 1;
  return interrupted() ? kInterruptedExit : 0;
}

}  // namespace

Subcommand add_check(CLI::App& app) {
  auto* parser = app.add_subcommand("check", "Compares the layer and its operations to an oracle");
  parser->footer(kHelp);
  auto settings = std::make_shared<CheckSettings>();
  settings->add_to(*parser, nullptr);
  const auto known_case = [](std::string& name) {
    const bool known = testkit::find_case(name) != nullptr;
    return known ? std::string() : "got '" + name + "', allowed: what --list_cases prints";
  };
  parser->add_option("--case", settings->case_name, "A case of the list, by its name")
      ->check(CLI::Validator(known_case, ""))
      ->type_name("NAME")
      // A case brings its own layer and seed.
      ->excludes(parser->get_option("--thiek"))
      ->excludes(parser->get_option("--layer"))
      ->excludes(parser->get_option("--seed"));
  parser->add_flag("--list_cases", settings->list_cases, "Print the names of all cases and end")
      ->check(no_value())
      ->excludes(parser->get_option("--json"));
  return {parser, [settings, seed = parser->get_option("--seed")] {
            settings->seed_given = seed->count() > 0;
            return run_check(*settings);
          }};
}

}  // namespace sonicmoe::cli
