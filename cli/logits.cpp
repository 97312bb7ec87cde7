#include "logits.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <random>
#include <regex>
#include <span>
#include <utility>

#include "settings.h"

namespace sonicmoe::cli {
namespace {

constexpr const char* kNpyMagic = "\x93NUMPY";
constexpr std::size_t kNpyLongest = 4096;  // NumPy writes some 120 bytes; std::regex recurses
constexpr std::size_t kNpyPrefix = 10;  // magic, version (2 bytes), length of the header (2 bytes)

[[noreturn]] void refuse(const std::string& path, const std::string& got,
                         const std::string& allowed) {
  throw UsageError("--logits: got '" + path + "'" + got + ", allowed: " + allowed);
}

std::string shape_text(std::int64_t tokens, std::int64_t experts) {
  return std::to_string(tokens) + "," + std::to_string(experts);
}

/// Takes T and E from the header, a Python dict in text; returns where the numbers begin.
std::size_t parse_npy(const std::string& path, const std::string& file, Logits* out) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(file[i]); };
  if (file.size() < kNpyPrefix) refuse(path, ", .npy without a header", "version 1");
  if (byte(6) != 1) refuse(path, ", .npy version " + std::to_string(byte(6)), "version 1");
  const std::size_t end = kNpyPrefix + byte(8) + 256 * std::size_t{byte(9)};
  if (end - kNpyPrefix > kNpyLongest) {
    refuse(path, ", .npy with a header of " + std::to_string(end - kNpyPrefix) + " bytes",
           "at most " + std::to_string(kNpyLongest));
  }
  const std::string header = file.substr(kNpyPrefix, end - kNpyPrefix);
  const auto field = [&](const std::string& pattern, const char* what) {
    std::smatch match;
    const bool found = std::regex_search(header, match, std::regex(pattern));
    if (!found) refuse(path, ", .npy without " + std::string(what), "a (T, E) array of float32");
    return match;
  };
  const std::string type = field("'descr': *'([^']*)'", "a plain data type")[1];
  if (type != "<f4") refuse(path, " of type '" + type + "'", "'<f4' (little-endian float32)");
  if (field("'fortran_order': *(True|False)", "an order")[1] != "False") {
    refuse(path, " in Fortran order", "C order");
  }
  const std::string shape = field("'shape': *\\(([^)]*)\\)", "a shape")[1];
  const auto sizes = parse_integers(std::regex_replace(shape, std::regex(" "), ""), 2);
  if (!sizes) refuse(path, " of shape (" + shape + ")", "two dimensions (T, E)");
  out->tokens = (*sizes)[0];
  out->experts = (*sizes)[1];
  return std::min(end, file.size());
}

bool is_product(std::size_t value, std::int64_t a, std::int64_t b) {
  if (a < 0 || b < 0) return false;
  if (a == 0 || b == 0) return value == 0;
  const auto divisor = static_cast<std::size_t>(a);
  return value % divisor == 0 && value / divisor == static_cast<std::size_t>(b);
}

}  // namespace

Logits read_logits(const std::string& path, const std::string& shape) {
  std::ifstream stream(path, std::ios::binary);
  // Reading is what fails for a folder; opening it does not.
  if (!stream || stream.peek() == std::ifstream::traits_type::eof()) {
    refuse(path, "", "a file that can be read and is not empty");
  }
  const std::string file{std::istreambuf_iterator<char>(stream), {}};
  Logits out;
  std::size_t begin = 0;
  if (!shape.empty()) {
    const auto sizes = *parse_integers(shape, 2);
    out.tokens = sizes[0];
    out.experts = sizes[1];
  }
  if (file.rfind(kNpyMagic, 0) == 0) {
    begin = parse_npy(path, file, &out);
    const std::string own = shape_text(out.tokens, out.experts);
    if (!shape.empty() && shape != own) {
      throw UsageError("--te: got '" + shape + "', allowed: " + own +
                       ", the shape in the .npy file");
    }
  } else if (shape.empty()) {
    throw UsageError("--te: got nothing, allowed: T,E of a file that is not .npy");
  }
  const std::span<const std::byte> data = std::as_bytes(std::span(file)).subspan(begin);
  if (data.size() % 4 != 0 || !is_product(data.size() / 4, out.tokens, out.experts)) {
    refuse(path, " with " + std::to_string(data.size()) + " bytes of numbers",
           "4*T*E for T,E = " + shape_text(out.tokens, out.experts));
  }
  out.values = testkit::decode(data, DType::f32);
  return out;
}

Logits random_logits(std::int64_t tokens, std::int64_t experts, double skew, std::uint64_t seed) {
  Logits out{tokens, experts, testkit::Tensor(static_cast<std::size_t>(tokens * experts))};
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  for (std::size_t i = 0; i < out.values.size(); ++i) {
    const auto expert = i % static_cast<std::size_t>(experts);
    out.values[i] = normal(engine) - skew * std::log(static_cast<double>(expert + 1));
  }
  return out;
}

}  // namespace sonicmoe::cli
