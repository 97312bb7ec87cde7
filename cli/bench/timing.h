#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "sonicmoe/status.h"

namespace sonicmoe::cli {

double median(std::vector<double> values);  ///< NaN without values
/// Median of the absolute deviations from the median.
double mad(const std::vector<double>& values);

/// Something to time, and what it took each time.
struct Task {
  std::string name;
  std::function<Status()> run;
  double flops = 0;
  /// Inputs read once plus outputs written once: what no implementation can avoid to move.
  double bytes = 0;
  /// CUDA: how long the call keeps the host, not how long the device works.
  bool on_host = false;
  std::vector<double> seconds = {};
};

/// Throws std::runtime_error with the text of a Status that is not ok.
void run(const Task& task);

/// Tasks that run one after the other on warm caches, as they would inside a layer. The caches are
/// flushed before each group; `before` (after the flush) and `after` run outside the timing.
struct Group {
  std::vector<Task> tasks;
  std::function<void()> before = {};
  std::function<void()> after = {};
};

/// Runs every group once per repeat, so that the groups see the same conditions of the machine,
/// after one repeat that is thrown away. Every second repeat goes backwards, for a chip grows hot
/// from group to group. A group may then find other values in memory that groups share. On CUDA
/// times are those between two events on the default stream. Stops early, between tasks, when
/// interrupted. Throws std::runtime_error with the text of a Status that is not ok.
void time_interleaved(std::vector<Group*> groups, int repeats, int threads, Device device = {});

/// Times in thermal steady state, on CUDA. Repeats every task by itself, with caches flushed in
/// between, the task with the most flops first. First it repeats a task for at least half of
/// `seconds`, and the first task for 5 s, until the chip has settled under load; then it times the
/// task for `seconds`. Tasks on the host are timed ten times. A group's `before` comes before each
/// run of each of its tasks. `after`, which only groups of the CPU have, is not called. Stops early
/// and throws like time_interleaved().
void time_in_steady_state(const std::vector<Group*>& groups, double seconds, Device device);

}  // namespace sonicmoe::cli
