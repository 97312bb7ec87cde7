#include "interrupt.h"

#include <csignal>

namespace sonicmoe::cli {
namespace {
volatile std::sig_atomic_t g_interrupted = 0;
}

void catch_interrupt() {
  struct sigaction action = {};
  action.sa_handler = [](int) { g_interrupted = 1; };
  action.sa_flags = SA_RESETHAND | SA_RESTART;  // the second Ctrl-C gets the default: it kills
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return g_interrupted != 0; }

}  // namespace sonicmoe::cli
