#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

namespace sonicmoe::cli {

/// One line on stderr that says what is going on and goes away; silent when it is not a terminal.
class Progress {
 public:
  ~Progress() { clear(); }
  void show(const std::string& text) const {
    if (terminal_) std::fprintf(stderr, "\r\033[K%s", text.c_str());
  }
  void clear() const { show(""); }

 private:
  bool terminal_ = isatty(STDERR_FILENO) == 1;
};

}  // namespace sonicmoe::cli
