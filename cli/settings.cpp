#include "settings.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "parsing.h"
#include "testkit/cases.h"

namespace sonicmoe::cli {
namespace {

template <class T>
std::optional<T> parse_integer(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

template <class Enum>
Enum from_name(const std::string& text) {
  const auto all = names<Enum>();
  return static_cast<Enum>(std::find(all.begin(), all.end(), text) - all.begin());
}

std::string check_activation(std::string& text) {
  ActivationSpec ignored;
  return parse(text, &ignored) ? "" : "got '" + text + "', allowed: " + join(names<Activation>());
}

std::string check_thiek(std::string& text) {
  return parse_integers(text, 5) ? "" : "got '" + text + "', allowed: five integers T,H,I,E,K";
}

std::string check_layer_text(std::string& text) {
  const auto layer = parse_layer(text);
  return layer.ok() ? "" : layer.status().message();
}

std::string check_skew(std::string& text) {
  double value = -1;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const bool fits = error == std::errc{} && stop == end && value >= 0 && value <= 1000;
  return fits ? "" : "got '" + text + "', allowed: numbers from 0 to 1000";
}

/// Whether write_json() can succeed, without touching an old report and without leaving an empty
/// file behind if there is never anything to write.
bool can_write(const std::filesystem::path& path) {
  const auto may = [](const std::filesystem::path& p, int mode) {
    return faccessat(AT_FDCWD, p.c_str(), mode, AT_EACCESS) == 0;
  };
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    return !std::filesystem::is_directory(path, ignored) && may(path, W_OK);
  }
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  return std::filesystem::is_directory(folder, ignored) && may(folder, W_OK | X_OK);
}

int usable_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

CLI::Option* add_skew(CLI::App& app, double& skew, const std::string& help) {
  return app.add_option("--skew", skew, help)
      ->check(CLI::Validator(check_skew, ""))
      ->type_name("S");
}

std::optional<std::vector<std::int64_t>> parse_integers(const std::string& text,
                                                        std::size_t count) {
  std::vector<std::int64_t> values;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    const std::size_t end = last ? text.size() : text.find(',', begin);
    if (end == std::string::npos) return std::nullopt;
    const auto value = parse_integer<std::int64_t>(text.substr(begin, end - begin));
    if (!value) return std::nullopt;
    values.push_back(*value);
    begin = end + 1;
  }
  return values;
}

CLI::Validator integer_in(std::int64_t low, std::int64_t high) {
  const std::string range = std::to_string(low) + " to " + std::to_string(high);
  return CLI::Validator(
      [=](std::string& text) {
        const auto value = parse_integer<std::int64_t>(text);
        const bool fits = value && *value >= low && *value <= high;
        return fits ? std::string() : "got '" + text + "', allowed: integers from " + range;
      },
      "");
}

CLI::Validator one_of(std::vector<std::string> allowed) {
  return CLI::Validator(
      [allowed = std::move(allowed)](std::string& text) {
        const bool known = std::find(allowed.begin(), allowed.end(), text) != allowed.end();
        return known ? std::string() : "got '" + text + "', allowed: " + join(allowed);
      },
      "");
}

CLI::Validator no_value() {
  return CLI::Validator(
      [](std::string& text) {
        return text == "true" ? std::string() : "got '" + text + "', allowed: no value";
      },
      "");
}

CLI::Validator file_name() {
  return CLI::Validator(
      [](std::string& text) {
        return text.empty() ? std::string("got '', allowed: the name of a file") : std::string();
      },
      "");
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

CLI::Option* Settings::add_thiek(CLI::App& app, const char* default_thiek) {
  const auto set = [this](const std::string& text) {
    const auto sizes = *parse_integers(text, 5);
    desc.tokens = sizes[0], desc.experts.hidden = sizes[1], desc.experts.intermediate = sizes[2];
    desc.router.experts = sizes[3], desc.router.top_k = sizes[4];
    has_shape = true;
  };
  auto* option = app.add_option_function<std::string>(
      "--thiek", set, "Tokens, hidden, intermediate, experts, experts a token");
  option->check(CLI::Validator(check_thiek, ""))->type_name("T,H,I,E,K");
  if (default_thiek != nullptr) {
    set(default_thiek);
    option->default_str(default_thiek);
  }
  return option;
}

CLI::Option* Settings::add_dtype(CLI::App& app) {
  const auto set = [this](const std::string& text) {
    desc.experts.dtype = from_name<DType>(text);
    dtype_given_ = true;
  };
  return app
      .add_option_function<std::string>("--dtype", set,
                                        "Of all tensors (default: f32 on cpu, bf16 on cuda)")
      ->check(one_of(names<DType>()))
      ->type_name(join(names<DType>()));
}

std::vector<CLI::Option*> Settings::add_router(CLI::App& app) {
  return {
      app.add_flag_callback(
             "--topk_over_softmax", [this] { desc.router.order = RouterOrder::score_then_select; },
             "Scores are the K largest of the softmax over all experts")
          ->check(no_value()),
      app.add_flag("--norm_topk_probs", desc.router.renormalize,
                   "With --topk_over_softmax: divide the K scores by their sum")
          ->check(no_value())};
}

CLI::Option* Settings::add_tile(CLI::App& app) {
  return add_integer(app, "--tile", tile, 1, 1024,
                     "Rows of an expert are rounded to multiples of this (default: 128)");
}

void Settings::add_run(CLI::App& app) {
  const auto set_device = [this](const std::string& text) {
    device.type = from_name<DeviceType>(text);
  };
  app.add_option_function<std::string>("--device", set_device, "Default: cpu")
      ->check(one_of(names<DeviceType>()))
      ->type_name(join(names<DeviceType>()));
  add_integer(app, "--threads", threads, 1, 4096,
              "CPU threads (default: all this process may use)");
  add_integer(app, "--seed", seed, 0, kMaxSeed, "Of everything random (default: 0)");
  app.add_option("--json", json, "Write the results to this file")
      ->check(file_name())
      ->type_name("FILE");
}

void Settings::add_to(CLI::App& app, const char* default_thiek) {
  auto* thiek = add_thiek(app, default_thiek);
  std::vector<CLI::Option*> of_layer = {add_dtype(app)};
  const auto set_activation = [this](const std::string& text) {
    parse(text, &desc.experts.activation);
  };
  of_layer.push_back(
      app.add_option_function<std::string>("--activation", set_activation, "Default: swiglu")
          ->check(CLI::Validator(check_activation, ""))
          ->type_name(join(names<Activation>())));
  const auto set_input = [this](const std::string& text) {
    desc.router.input = from_name<RouterInput>(text);
  };
  of_layer.push_back(
      app.add_option_function<std::string>("--router_input", set_input,
                                           "What the caller hands over (default: projection)")
          ->check(one_of(names<RouterInput>()))
          ->type_name(join(names<RouterInput>())));
  for (auto* option : add_router(app)) of_layer.push_back(option);
  const auto set_rounding = [this](const std::string& text) {
    parse(text, &desc.rounding.rule);
    rounding_given_ = true;
  };
  auto* rounding = app.add_option_function<std::string>("--rounding", set_rounding,
                                                        "Token rounding (default: plain top-K)")
                       ->check(rounding_rule())
                       ->type_name(join(names<RoundingRule>()));
  of_layer.push_back(rounding);
  add_tile(app)->needs(rounding);
  of_layer.push_back(app.add_flag_callback(
                            "--concat_layout",
                            [this] { desc.experts.w1_layout = W1Layout::concatenated; },
                            "W1 rows are [gate | up] instead of alternating gate and up")
                         ->check(no_value()));
  of_layer.push_back(app.add_flag("--add_bias", desc.experts.bias, "Experts have biases b1 and b2")
                         ->check(no_value()));
  of_layer.push_back(
      app.add_flag("--inference", desc.experts.inference, "Forward only, nothing kept for backward")
          ->check(no_value()));
  if (default_thiek == nullptr) {
    for (auto* option : of_layer) option->needs(thiek);
  }
  const auto set_layer = [this](const std::string& text) {
    desc = parse_layer(text).value();
    has_shape = dtype_given_ = true;
  };
  std::string keys;
  for (const LayerField& field : layer_fields())
    keys += (keys.empty() ? "" : ", ") + std::string(field.key);
  auto* layer = app.add_option_function<std::string>(
      "--layer", set_layer, "The whole layer as one text, as reports write it, of " + keys);
  layer->check(layer_text())->type_name("'KEY=VALUE ...'");
  layer->excludes(thiek);
  for (auto* option : of_layer) layer->excludes(option);
  add_run(app);
  add_integer(app, "--multiprocessors", multiprocessors, 0, 4096,
              "Of a CUDA device, that products fill; even (default: 0, all; the bound has all)");
}

namespace {

/// Experts alone have no router: an option of one would change nothing. Lists, which name the owner
/// of each row, are what `check` adds.
void check_rows(const LayerDesc& desc) {
  if (desc.experts.gathers()) return;
  LayerDesc plain = desc;
  plain.rounding = {};
  plain.router = {.experts = desc.router.experts,
                  .input = desc.router.input,
                  .list_length = desc.router.list_length};
  for (const LayerField& field : layer_fields()) {
    const std::string value = layer_field(desc, field.key);
    if (value == layer_field(plain, field.key)) continue;
    throw UsageError(std::string("--layer: got ") + field.key + "=" + value +
                     ", allowed: no options of a router with row_source=contiguous");
  }
}

}  // namespace

void Settings::resolve() {
  if (threads == 0) threads = usable_threads();
  if (!dtype_given_) desc.experts.dtype = device.type == DeviceType::cpu ? DType::f32 : DType::bf16;
  if (rounding_given_) desc.rounding.tile = tile;
  if (!json.empty() && !can_write(json)) {
    throw UsageError("--json: got '" + json + "', allowed: a file that can be written");
  }
  check_rows(desc);
}

std::string Settings::thiek_line() const {
  std::string line = "--thiek";
  char separator = ' ';
  for (auto size : {desc.tokens, desc.experts.hidden, desc.experts.intermediate,
                    desc.router.experts, desc.router.top_k}) {
    line += separator + std::to_string(size);
    separator = ',';
  }
  return line;
}

std::string Settings::router_line() const {
  std::string line;
  if (desc.router.order == RouterOrder::score_then_select) line += " --topk_over_softmax";
  if (desc.router.renormalize) line += " --norm_topk_probs";
  return line;
}

CLI::Validator rounding_rule(const std::string& more) {
  const auto check = [more](std::string& text) {
    RoundingRule ignored{};
    if (parse(text, &ignored) || text == more) return std::string();
    return "got '" + text + "', allowed: " + (more.empty() ? "" : more + ", ") +
           join(names<RoundingRule>());
  };
  return CLI::Validator(check, "");
}

CLI::Validator layer_text() { return CLI::Validator(check_layer_text, ""); }

LayerDesc with_options(const LayerDesc& desc, const std::string& text) {
  std::string all = text;
  for (const LayerField& field : layer_fields()) {
    const std::string item = std::string(" ") + field.key + "=";
    if ((" " + text).find(item) == std::string::npos) all += item + layer_field(desc, field.key);
  }
  return parse_layer(all).value();
}

std::string Settings::layer_line() const { return testkit::layer_option(desc) + device_line(); }

std::string Settings::device_line() const {
  const bool is_cpu = device.type == DeviceType::cpu;
  return (is_cpu ? "" : std::string(" --device ") + name(device.type)) + multiprocessors_line();
}

std::string Settings::multiprocessors_line() const {
  return multiprocessors == 0 ? "" : " --multiprocessors " + std::to_string(multiprocessors);
}

Json Settings::layer_json() const {
  Json layer = {{"text", to_string(desc)},
                {"thiek",
                 {desc.tokens, desc.experts.hidden, desc.experts.intermediate, desc.router.experts,
                  desc.router.top_k}}};
  for (const LayerField& field : layer_fields()) {
    const std::string value = layer_field(desc, field.key);
    if (field.allowed == "an integer") {
      layer[field.key] = *parse_integer<std::int64_t>(value);
    } else if (field.allowed == "true, false") {
      layer[field.key] = value == "true";
    } else {
      layer[field.key] = value;
    }
  }
  return layer;
}

Options Settings::options() const {
  Options options;
  options.threads = threads;
  options.multiprocessors = multiprocessors;
  return options;
}

std::string device_name(Device wanted) {
  for (const auto& info : devices()) {
    if (info.device.type == wanted.type && info.device.index == wanted.index) return info.name;
  }
  return name(wanted.type);
}

Json finite(double value) { return std::isfinite(value) ? Json(value) : Json(); }

void write_json(const std::string& path, const Json& report) {
  if (path.empty()) return;
  // A file's name need not be UTF-8. As text before the file is opened: what is there stays if it
  // fails.
  const std::string text = report.dump(2, ' ', false, Json::error_handler_t::replace);
  std::ofstream file(path);
  file << text << '\n';
  if (!file.flush()) throw std::runtime_error("--json: writing '" + path + "' failed");
}

}  // namespace sonicmoe::cli
