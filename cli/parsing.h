#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

/// Options and checks for CLI11.
namespace sonicmoe::cli {

/// A check for CLI11: an integer in [low, high]. Checks carry no description of their own: the
/// options' type names say what is allowed.
CLI::Validator integer_in(std::int64_t low, std::int64_t high);
/// An option whose value is an integer in [low, high].
template <class T>
CLI::Option* add_integer(CLI::App& app, const std::string& option, T& value, std::int64_t low,
                         std::int64_t high, const std::string& help) {
  return app.add_option(option, value, help)
      ->check(integer_in(low, high))
      ->type_name(std::to_string(low) + " to " + std::to_string(high));
}
/// --skew, how popular some experts are.
CLI::Option* add_skew(CLI::App& app, double& skew, const std::string& help);
/// A check for CLI11: one of these words.
CLI::Validator one_of(std::vector<std::string> allowed);
/// A check for CLI11: what parse() takes for a rounding rule, or the word `more`.
CLI::Validator rounding_rule(const std::string& more = "");
/// A check for CLI11: the text form of a layer, or of some of its options.
CLI::Validator layer_text();
/// A check for flags: "--flag=value" is refused.
CLI::Validator no_value();
/// Of an option that names a file: an empty value, as of a variable that is not set, is a mistake.
CLI::Validator file_name();

}  // namespace sonicmoe::cli
