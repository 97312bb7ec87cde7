#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "parsing.h"
#include "subcommands.h"

namespace sonicmoe::cli {
namespace {

constexpr const char* kHelp =
    "Kernels are listed best first within an operation; a plan takes the first that neither\n"
    "rejects a shape nor defers it to a later one.\n"
    "JSON: version, command, devices [{id, name, details, usable, reason}], kernels [{op,\n"
    "name, device}]; with --thiek or --layer also layer {text, thiek, each field of the text}\n"
    "and explain, the plan as printed. reason says why a device is not usable, else it is empty.";

Json device_list() {
  Json list = Json::array();
  std::printf("devices:\n");
  for (const auto& info : devices()) {
    const std::string id = name(info.device.type) + (":" + std::to_string(info.device.index));
    const std::string state = info.usable ? "usable" : "not usable: " + info.reason;
    const std::string details = info.details.empty() ? "" : " (" + info.details + ")";
    std::printf("  %-8s %s%s: %s\n", id.c_str(), info.name.c_str(), details.c_str(), state.c_str());
    list.push_back({{"id", id},
                    {"name", info.name},
                    {"details", info.details},
                    {"usable", info.usable},
                    {"reason", info.reason}});
  }
  return list;
}

Json kernel_list() {
  Json list = Json::array();
  std::printf("kernels, best first within an operation:\n");
  for (const auto& info : kernels()) {
    std::printf("  %-5s %-19s %s\n", name(info.device), info.op.c_str(), info.name.c_str());
    list.push_back({{"op", info.op}, {"name", info.name}, {"device", name(info.device)}});
  }
  return list;
}

int run_info(Settings& settings) {
  settings.resolve();
  // The refusal, if any, comes before the lists: it is the one line that the caller must see.
  std::string explanation;
  if (settings.has_shape) explanation = settings.explain(settings.desc, settings.layer_line());
  Json report = {{"version", version()}, {"command", "info"}};
  std::printf("sonicmoe %s\n", version());
  report["devices"] = device_list();
  report["kernels"] = kernel_list();
  if (settings.has_shape) {
    std::printf("plan for %s:\n%s", settings.layer_line().c_str(), explanation.c_str());
    report["layer"] = settings.layer_json();
    report["explain"] = explanation;
  }
  write_json(settings.json, report);
  return 0;
}

}  // namespace

Subcommand add_info(CLI::App& app) {
  auto* parser = app.add_subcommand(
      "info", "Version, devices and kernels; with --thiek, which kernels a plan takes and why");
  parser->footer(kHelp);
  auto settings = std::make_shared<Settings>();
  settings->add_to(*parser, nullptr);
  return {parser, [settings] { return run_info(*settings); }};
}

}  // namespace sonicmoe::cli
