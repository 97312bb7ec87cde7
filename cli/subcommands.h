#pragma once

#include <functional>

#include "settings.h"

namespace sonicmoe::cli {

/// One subcommand: its parser, and what to do once everything is parsed. `run` returns the exit
/// code: 0, 1 (a check failed) or 130 (interrupted); it throws UsageError for exit code 2.
struct Subcommand {
  CLI::App* parser = nullptr;
  std::function<int()> run;
};

Subcommand add_check(CLI::App& app);
Subcommand add_bench(CLI::App& app);
Subcommand add_info(CLI::App& app);
Subcommand add_route(CLI::App& app);

}  // namespace sonicmoe::cli
