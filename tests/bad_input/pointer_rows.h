#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "sonicmoe/status.h"

namespace sonicmoe::testkit {

/// One pointer of an argument struct, and how its refusal describes it. Tensors are fp32 here.
template <class Args>
struct PointerRow {
  std::string name;
  std::string shape;
  std::size_t alignment;
  std::function<void(Args*)> clear;
  std::function<const void*(Args*)> misalign;  ///< returns the new address
  bool optional;
};

template <class Args, class Pointer>
PointerRow<Args> pointer_row(const char* name, Pointer Args::*member, const char* shape,
                             std::size_t alignment = 4, bool optional = false) {
  return {name,
          shape,
          alignment,
          [member](Args* args) { args->*member = nullptr; },
          [member](Args* args) -> const void* {
            const auto address = reinterpret_cast<std::uintptr_t>(args->*member) + 2;
            return args->*member = reinterpret_cast<Pointer>(address);
          },
          optional};
}

/// Calls with each pointer null (unless it is optional) and misaligned. `expect(args, message)`
/// must make the call and hold its refusal to the message.
template <class Args, class Expect>
void for_each_bad_pointer(const Args& good, const std::vector<PointerRow<Args>>& rows,
                          Expect expect) {
  for (const PointerRow<Args>& row : rows) {
    if (!row.optional) {
      Args args = good;
      row.clear(&args);
      expect(args, row.name + ": got null, allowed: a pointer to " + row.shape);
    }
    Args args = good;
    char text[256];
    std::snprintf(text, sizeof text, "%s: got address %p, allowed: multiples of %zu bytes",
                  row.name.c_str(), row.misalign(&args), row.alignment);
    expect(args, text);
  }
}

}  // namespace sonicmoe::testkit
