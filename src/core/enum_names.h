#pragma once

#include <string>
#include <string_view>

#include "sonicmoe/types.h"

namespace sonicmoe {

/// Calls f(value) for every enumerator. The enum must count up from 0 and have a name() for each.
template <class Enum, class F>
void for_each_named(F&& f) {
  for (int i = 0; std::string_view(name(static_cast<Enum>(i))) != "?"; ++i) f(static_cast<Enum>(i));
}

/// All names, as in "f32, bf16, f16".
template <class Enum>
std::string all_names() {
  std::string list;
  for_each_named<Enum>(
      [&](Enum value) { list += (list.empty() ? "" : ", ") + std::string(name(value)); });
  return list;
}

/// False, and nothing written, if no enumerator has this name.
template <class Enum>
bool parse_name(std::string_view text, Enum* out) {
  bool found = false;
  for_each_named<Enum>([&](Enum value) {
    if (text != name(value)) return;
    *out = value;
    found = true;
  });
  return found;
}

}  // namespace sonicmoe
