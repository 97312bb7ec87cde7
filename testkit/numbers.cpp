#include "testkit/numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "testkit/parallel.h"

namespace sonicmoe::testkit {
namespace {

struct Format {
  int precision;   // significant bits
  double normal;   // smallest normal number
  double spacing;  // of the numbers below it
  double max;      // largest finite value
};

Format format_of(DType type) {
  switch (type) {
    case DType::bf16:
      return {8, 0x1p-126, 0x1p-133, 0x1.fep127};
    case DType::f16:
      return {11, 0x1p-14, 0x1p-24, 65504.0};
    case DType::f32:
      return {24, 0x1p-126, 0x1p-149, 0x1.fffffep127};
  }
  throw std::invalid_argument("unknown dtype");
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::uint16_t bits_of(double value, DType type) {  // of a value that the 16-bit type can hold
  if (type == DType::bf16) {
    const auto single = static_cast<float>(value);
    std::uint32_t bits;
    std::memcpy(&bits, &single, sizeof bits);
    return static_cast<std::uint16_t>(bits >> 16);
  }
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return sign | static_cast<std::uint16_t>(magnitude * 0x1p24);
  const int exponent = std::ilogb(magnitude);
  const auto mantissa = static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>(sign | ((exponent + 15) << 10) | mantissa);
}

double value_of(std::uint16_t bits, DType type) {
  if (type == DType::bf16) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float single;
    std::memcpy(&single, &wide, sizeof single);
    return single;
  }
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * mantissa * 0x1p-24;
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

}  // namespace

double round_to(double value, DType type) {
  if (value == 0 || !std::isfinite(value)) return value;
  const Format format = format_of(type);
  double rounded;
  if (std::fabs(value) < format.normal) {
    rounded = std::nearbyint(value / format.spacing) * format.spacing;
  } else {
    // Cuts `drop` bits off the mantissa, after adding almost half of what they are worth; a carry
    // into the exponent is right.
    const int drop = 53 - format.precision;
    auto bits = std::bit_cast<std::uint64_t>(value);
    bits += (std::uint64_t{1} << (drop - 1)) - 1 + ((bits >> drop) & 1);
    rounded = std::bit_cast<double>(bits >> drop << drop);
  }
  if (std::fabs(rounded) <= format.max) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

std::vector<std::byte> encode(const Tensor& values, DType type) {
  std::vector<std::byte> bytes(values.size() * size_of(type));
  for_each_index(std::ssize(values), [&](auto i) {
    const double rounded = round_to(values[i], type);
    if (type == DType::f32) {
      const auto single = static_cast<float>(rounded);
      std::memcpy(&bytes[4 * i], &single, 4);
    } else {
      const std::uint16_t bits = bits_of(rounded, type);
      std::memcpy(&bytes[2 * i], &bits, 2);
    }
  });
  return bytes;
}

Tensor decode(std::span<const std::byte> bytes, DType type) {
  Tensor values(bytes.size() / size_of(type));
  for_each_index(std::ssize(values), [&](auto i) {
    values[i] = type == DType::f32 ? load<float>(&bytes[4 * i])
                                   : value_of(load<std::uint16_t>(&bytes[2 * i]), type);
  });
  return values;
}

ErrorNorm error_norm(std::span<const double> ours, std::span<const double> exact) {
  if (ours.size() != exact.size()) {
    return {std::numeric_limits<double>::infinity(), 0, exact.size()};
  }
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += (ours[i] - exact[i]) * (ours[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return {std::sqrt(error), std::sqrt(norm), exact.size()};
}

Check two_times_rule(const std::string& tensor, std::span<const double> ours,
                     std::span<const double> exact, std::span<const double> plain,
                     std::span<const std::size_t> block_ends, const Slack& slack) {
  Check check{tensor, 0, 0, true, ""};
  if (ours.size() != exact.size() || plain.size() != exact.size()) {
    check.pass = false;
    check.note = "sizes differ: ours " + std::to_string(ours.size()) + ", exact " +
                 std::to_string(exact.size()) + ", plain " + std::to_string(plain.size());
    return check;
  }
  const ErrorNorm whole = error_norm(plain, exact);
  double worst = -1;  // largest error over bound so far
  const auto judge = [&](std::size_t begin, std::size_t end, const std::string& note) {
    const std::size_t count = end - begin;
    if (count == 0) return;
    const ErrorNorm us = error_norm(ours.subspan(begin, count), exact.subspan(begin, count));
    const ErrorNorm them = error_norm(plain.subspan(begin, count), exact.subspan(begin, count));
    const double share = whole.error * std::sqrt(static_cast<double>(count) / exact.size());
    double independent = static_cast<double>(count);
    if (slack.independent > 0) {
      independent = std::clamp(slack.independent * independent / exact.size(), 1.0, independent);
    }
    const double chance = 4 * 0x1p-24 * (1 + 4 / std::sqrt(independent));
    const double bound =
        2 * std::max(them.error, share) + (chance + slack.relative) * us.norm + slack.absolute;
    const bool pass = us.error <= bound;  // false for NaN, on either side
    double ratio = us.error == 0 ? 0 : us.error / bound;
    if (!pass && std::isnan(ratio)) ratio = std::numeric_limits<double>::infinity();
    check.pass = check.pass && pass;
    if (ratio <= worst) return;
    worst = ratio;
    const double scale = us.norm > 0 ? us.norm : 1;
    check.error = us.error / scale;
    check.bound = bound / scale;
    check.note = note;
  };
  judge(0, exact.size(), "");
  std::size_t begin = 0;
  for (std::size_t b = 0; b < block_ends.size(); ++b) {
    judge(begin, block_ends[b], "block " + std::to_string(b));
    begin = block_ends[b];
  }
  return check;
}

double cancellation_allowance(std::span<const double> magnitudes) {
  double squares = 0;
  for (const double magnitude : magnitudes) squares += magnitude * magnitude;
  return 4 * 0x1p-24 * std::sqrt(squares);
}

Check same_values(const std::string& tensor, std::span<const double> ours,
                  std::span<const double> expected) {
  Check check{tensor, 0, 0, ours.size() == expected.size(), ""};
  if (!check.pass) {
    check.note = "sizes differ: ours " + std::to_string(ours.size()) + ", expected " +
                 std::to_string(expected.size());
    return check;
  }
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (ours[i] == expected[i]) continue;
    if (check.pass) {
      check.note = "element " + std::to_string(i) + " is " + std::to_string(ours[i]) + ", not " +
                   std::to_string(expected[i]);
    }
    check.pass = false;
    check.error = std::fmax(check.error, std::fabs(ours[i] - expected[i]));
  }
  return check;
}

}  // namespace sonicmoe::testkit
