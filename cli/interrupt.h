#pragma once

namespace sonicmoe::cli {

/// Ctrl-C once asks the running subcommand to stop and print what it has; twice kills the process.
void catch_interrupt();
bool interrupted();

inline constexpr int kInterruptedExit = 130;  // 128 + SIGINT, as shells report it

}  // namespace sonicmoe::cli
