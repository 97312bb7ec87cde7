#include "operators.h"

namespace sonicmoe::python {
namespace {

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return json + '"';
}

std::string field(const char* key, const std::string& value, const char* end = ", ") {
  return quoted(key) + ": " + quoted(value) + end;
}

std::string json(const DeviceInfo& info) {
  std::string text = "{";
  text += field("type", name(info.device.type)) + field("name", info.name);
  text += field("details", info.details) + field("reason", info.reason);
  text += "\"index\": " + std::to_string(info.device.index);
  text += info.usable ? ", \"usable\": true}" : ", \"usable\": false}";
  return text;
}

std::string json(const KernelInfo& info) {
  std::string text = "{";
  text += field("op", info.op) + field("name", info.name) + field("device", name(info.device), "");
  text += '}';
  return text;
}

template <class Info>
std::string json(const std::vector<Info>& infos) {
  std::string text;
  for (const Info& info : infos) text += (text.empty() ? "" : ", ") + json(info);
  return "[" + text + "]";
}

}  // namespace

std::string info() {
  return "{\"devices\": " + json(devices()) + ", \"kernels\": " + json(kernels()) + "}";
}

std::string build_version() { return SONICMOE_BUILD_VERSION; }

}  // namespace sonicmoe::python
