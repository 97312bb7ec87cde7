#include "settings.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <optional>
#include <thread>

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

/// The names of an enum whose values count up from 0.
template <class Enum>
std::vector<std::string> names() {
  std::vector<std::string> all;
  for (int i = 0; name(static_cast<Enum>(i)) != std::string("?"); ++i) {
    all.emplace_back(name(static_cast<Enum>(i)));
  }
  return all;
}

template <class Enum>
Enum from_name(const std::string& text) {
  const auto all = names<Enum>();
  return static_cast<Enum>(std::find(all.begin(), all.end(), text) - all.begin());
}

std::optional<std::array<std::int64_t, 5>> parse_thiek(const std::string& text) {
  std::array<std::int64_t, 5> sizes{};
  std::size_t begin = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const bool last = i + 1 == sizes.size();
    const std::size_t end = last ? text.size() : text.find(',', begin);
    if (end == std::string::npos) return std::nullopt;
    const auto size = parse_integer<std::int64_t>(text.substr(begin, end - begin));
    if (!size) return std::nullopt;
    sizes[i] = *size;
    begin = end + 1;
  }
  return sizes;
}

std::string check_thiek(std::string& text) {
  return parse_thiek(text) ? "" : "got '" + text + "', allowed: five integers T,H,I,E,K";
}

int usable_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

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

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

void Settings::add_to(CLI::App& app, const char* default_thiek) {
  const auto set_thiek = [this](const std::string& text) {
    const auto [tokens, hidden, intermediate, experts, top_k] = *parse_thiek(text);
    desc.tokens = tokens, desc.hidden = hidden, desc.intermediate = intermediate;
    desc.experts = experts, desc.top_k = top_k;
    has_shape = true;
  };
  const auto text_option = [&app](const char* option, auto set, const char* help) {
    return app.add_option_function<std::string>(option, set, help);
  };
  auto* thiek =
      text_option("--thiek", set_thiek, "Tokens, hidden, intermediate, experts, experts a token")
          ->check(CLI::Validator(check_thiek, ""))
          ->type_name("T,H,I,E,K");
  if (default_thiek != nullptr) {
    set_thiek(default_thiek);
    thiek->default_str(default_thiek);
  }

  const auto set_dtype = [this](const std::string& text) {
    desc.dtype = from_name<DType>(text);
    dtype_given_ = true;
  };
  const auto set_activation = [this](const std::string& text) {
    desc.activation = from_name<Activation>(text);
  };
  const std::vector<CLI::Option*> of_layer = {
      text_option("--dtype", set_dtype, "Of all tensors (default: f32 on cpu, bf16 on cuda)")
          ->check(one_of(names<DType>()))
          ->type_name(join(names<DType>())),
      text_option("--activation", set_activation, "Default: swiglu")
          ->check(one_of(names<Activation>()))
          ->type_name(join(names<Activation>())),
      app.add_flag_callback(
             "--topk_over_softmax", [this] { desc.router = RouterMode::topk_over_softmax; },
             "Scores are the K largest of the softmax over all experts")
          ->check(no_value()),
      app.add_flag("--norm_topk_probs", desc.norm_topk_probs,
                   "With --topk_over_softmax: divide the K scores by their sum")
          ->check(no_value()),
      app.add_flag_callback(
             "--concat_layout", [this] { desc.w1_layout = W1Layout::concatenated; },
             "W1 rows are [gate | up] instead of gate and up in turn")
          ->check(no_value()),
      app.add_flag("--add_bias", desc.bias, "Experts have biases b1 and b2")->check(no_value()),
      app.add_flag("--inference", desc.inference, "Forward only, nothing kept for backward")
          ->check(no_value()),
  };
  if (default_thiek == nullptr) {
    for (auto* option : of_layer) option->needs(thiek);
  }

  const auto set_device = [this](const std::string& text) {
    device.type = from_name<DeviceType>(text);
  };
  text_option("--device", set_device, "Default: cpu")
      ->check(one_of(names<DeviceType>()))
      ->type_name(join(names<DeviceType>()));
  app.add_option("--threads", threads, "CPU threads (default: all this process may use)")
      ->check(integer_in(1, 4096));
  app.add_option("--seed", seed, "Of the random inputs (default: 0)")
      ->check(integer_in(0, std::int64_t{1} << 53));
  app.add_option("--json", json, "Write the results to this file")->type_name("FILE");
}

void Settings::resolve() {
  if (threads == 0) threads = usable_threads();
  if (!dtype_given_) desc.dtype = device.type == DeviceType::cpu ? DType::f32 : DType::bf16;
  // Appending does not destroy an old report before there is a new one.
  if (!json.empty() && !std::ofstream(json, std::ios::app)) {
    throw UsageError("--json: got '" + json + "', allowed: a file that can be written");
  }
}

std::string Settings::layer_line() const {
  std::string line = "--thiek";
  char separator = ' ';
  for (auto size : {desc.tokens, desc.hidden, desc.intermediate, desc.experts, desc.top_k}) {
    line += separator + std::to_string(size);
    separator = ',';
  }
  line += std::string(" --dtype ") + name(desc.dtype);
  if (desc.activation != Activation::swiglu)
    line += std::string(" --activation ") + name(desc.activation);
  if (desc.router == RouterMode::topk_over_softmax) line += " --topk_over_softmax";
  if (desc.norm_topk_probs) line += " --norm_topk_probs";
  if (desc.w1_layout == W1Layout::concatenated) line += " --concat_layout";
  if (desc.bias) line += " --add_bias";
  if (desc.inference) line += " --inference";
  return line + device_line();
}

std::string Settings::device_line() const {
  return device.type == DeviceType::cpu ? "" : std::string(" --device ") + name(device.type);
}

Json Settings::layer_json() const {
  return {{"thiek", {desc.tokens, desc.hidden, desc.intermediate, desc.experts, desc.top_k}},
          {"dtype", name(desc.dtype)},
          {"activation", name(desc.activation)},
          {"w1_layout", name(desc.w1_layout)},
          {"router", name(desc.router)},
          {"norm_topk_probs", desc.norm_topk_probs},
          {"bias", desc.bias},
          {"inference", desc.inference}};
}

Options Settings::options() const {
  Options options;
  options.threads = threads;
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
  std::ofstream file(path);
  file << report.dump(2) << '\n';
  if (!file.flush()) throw std::runtime_error("--json: writing '" + path + "' failed");
}

}  // namespace sonicmoe::cli
