#include <cstdio>
#include <new>

#include "interrupt.h"
#include "parsing.h"
#include "subcommands.h"

namespace sonicmoe::cli {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 all right; 1 a check failed or the run broke off; 2 an option is wrong or\n"
    "the library refuses it; 130 interrupted (Ctrl-C prints what there is).";

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) names.push_back(option->get_name());
  return names;
}

/// What the parser did not recognise. CLI11's own text would not say what is allowed.
std::string unknown(const CLI::App& app, const std::string& word) {
  if (word.rfind('-', 0) == 0) {
    return "option: got '" + word + "', allowed: " + join(option_names(app));
  }
  std::vector<std::string> subcommands;
  for (const auto* sub : app.get_subcommands(nullptr)) subcommands.push_back(sub->get_name());
  if (!subcommands.empty()) {
    return "subcommand: got '" + word + "', allowed: " + join(subcommands);
  }
  return "argument: got '" + word + "', allowed: options only (" + join(option_names(app)) + ")";
}

/// What the parser refuses, in the words of every other message; checks of values have them
/// already.
std::string refusal(const CLI::App& app, const CLI::ParseError& error) {
  const std::string text = error.what();
  const auto parsed = app.get_subcommands();
  if (parsed.empty()) return text;
  if (error.get_name() == "ArgumentMismatch") {
    const auto* option = parsed.front()->get_option_no_throw(text.substr(0, text.find(':')));
    if (option == nullptr) return text;
    const bool repeated = option->count() > 1;
    return option->get_name() + ": got " +
           (repeated ? std::to_string(option->count()) + " values, allowed: one"
                     : "nothing, allowed: " + option->get_type_name());
  }
  if (error.get_name() != "RequiresError" && error.get_name() != "ExcludesError") return text;
  for (const auto* option : parsed.front()->get_options()) {
    if (option->count() == 0) continue;
    const std::string got = option->get_name() + ": got '" + option->results().front() + "'";
    for (const auto* other : option->get_needs()) {
      if (other->count() == 0) return got + ", allowed: only with " + other->get_name();
    }
    for (const auto* other : option->get_excludes()) {
      if (other->count() > 0) return got + ", allowed: only without " + other->get_name();
    }
  }
  return text;
}

int run(int argc, char** argv) {
  CLI::App app("Checks, times and describes sonicmoe's Mixture-of-Experts layer.", "sonicmoe");
  app.footer(kFooter);
  app.set_version_flag("--version", version());
  const std::vector<Subcommand> all = {add_check(app), add_bench(app), add_info(app),
                                       add_route(app)};
  app.require_subcommand(0, 1);
  app.allow_extras();
  for (const auto& sub : all) sub.parser->allow_extras();

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help, --version
  } catch (const CLI::ParseError& error) {
    throw UsageError(refusal(app, error));
  }
  for (const auto& sub : all) {
    if (!sub.parser->parsed()) continue;
    const auto extras = sub.parser->remaining();
    if (!extras.empty()) throw UsageError(unknown(*sub.parser, extras.front()));
    const auto outside = app.remaining();
    if (!outside.empty()) throw UsageError(unknown(app, outside.front()));
    return sub.run();
  }
  const auto extras = app.remaining();
  if (!extras.empty()) throw UsageError(unknown(app, extras.front()));
  std::fputs(app.help().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace sonicmoe::cli

int main(int argc, char** argv) {
  sonicmoe::cli::catch_interrupt();
  try {
    const int code = sonicmoe::cli::run(argc, argv);
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    std::fprintf(stderr, "sonicmoe: standard output: not all of it could be written\n");
  } catch (const sonicmoe::cli::UsageError& error) {
    std::fprintf(stderr, "sonicmoe: %s\n", error.what());
    return 2;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "sonicmoe: not enough memory for these sizes\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sonicmoe: %s\n", error.what());
  }
  return 1;
}
