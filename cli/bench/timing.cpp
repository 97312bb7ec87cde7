#include "timing.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cli/interrupt.h"
#include "cli/progress.h"
#include "device_clock.h"

namespace sonicmoe::cli {
namespace {

/// Throws the contents of all caches out by writing memory twice as large as the last level.
class CacheFlush {
 public:
  explicit CacheFlush(int threads)
      : threads_(threads),
        memory_(2 * static_cast<std::size_t>(std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 1L << 25))) {}

  void operator()() {
    // Every thread writes, because each core has private caches.
    const auto bytes = static_cast<std::int64_t>(memory_.bytes());
    auto* memory = memory_.as<volatile char>();
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t i = 0; i < bytes; i += 64) memory[i] = static_cast<char>(memory[i] + 1);
  }

 private:
  int threads_;
  Buffer memory_;
};

double time_once(const Task& task, DeviceClock* clock) {
  if (clock != nullptr && task.on_host) clock->wait();
  if (clock != nullptr) clock->start();
  const auto start = std::chrono::steady_clock::now();
  run(task);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const double on_device = clock != nullptr ? clock->stop() : 0;
  return clock != nullptr && !task.on_host ? on_device : elapsed.count();
}

}  // namespace

void run(const Task& task) {
  const Status status = task.run();
  if (!status.ok()) throw std::runtime_error(task.name + ": " + status.message());
}

double median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const std::size_t middle = values.size() / 2;
  std::sort(values.begin(), values.end());
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double mad(const std::vector<double>& values) {
  const double center = median(values);
  std::vector<double> deviations;
  for (double value : values) deviations.push_back(std::abs(value - center));
  return median(deviations);
}

void time_interleaved(std::vector<Group*> groups, int repeats, int threads, Device device) {
  std::optional<CacheFlush> flush;
  std::optional<DeviceClock> clock;
  if (device.type == DeviceType::cpu) {
    flush.emplace(threads);
  } else {
    clock.emplace(device);
  }
  const Progress progress;
  for (int repeat = 0; repeat <= repeats; ++repeat) {
    progress.show(repeat == 0
                      ? "warming up"
                      : "repeat " + std::to_string(repeat) + " of " + std::to_string(repeats));
    for (Group* group : groups) {
      if (flush) (*flush)();
      if (clock) clock->flush();
      if (group->before) group->before();
      for (auto& task : group->tasks) {
        if (interrupted()) return;
        const double seconds = time_once(task, clock ? &*clock : nullptr);
        if (repeat > 0) task.seconds.push_back(seconds);
      }
      if (group->after) group->after();
    }
    if (repeat > 0) std::ranges::reverse(groups);
  }
}

void time_in_steady_state(const std::vector<Group*>& groups, double seconds, Device device) {
  using Clock = std::chrono::steady_clock;
  // From idle an H200 clocks high for 0.1 s, and every second its power control brakes too hard, by
  // 14 to 24 % at first and 3 to 6 at 2.9 s (docs/findings/sustained.md).
  constexpr double kSettle = 5;
  DeviceClock clock(device);
  const Progress progress;
  // What works hardest first: what leaves the chip cool must not come before it.
  std::vector<std::pair<const Group*, Task*>> tasks;
  for (Group* group : groups) {
    for (Task& task : group->tasks) tasks.emplace_back(group, &task);
  }
  std::ranges::stable_sort(tasks, std::greater(),
                           [](const auto& of_group) { return of_group.second->flops; });
  bool settled = false;
  for (const auto& of_group : tasks) {
    const Group* const group = of_group.first;
    Task* const task = of_group.second;
    progress.show(task->name);
    if (task->on_host) {
      constexpr int kRuns = 10;
      for (int i = 0; i < kRuns && !interrupted(); ++i) {
        task->seconds.push_back(time_once(*task, &clock));
      }
      continue;
    }
    const auto repeat = [&](int count) {
      if (interrupted()) return std::vector<double>();
      const auto before = [group] {
        if (group->before && !interrupted()) group->before();
      };
      return clock.repeat(count, before, [task] {
        if (!interrupted()) run(*task);
      });
    };
    // How many runs fill the time, flushes included.
    constexpr int kTries = 5;
    repeat(1);  // what is initialised by the first run
    const auto start = Clock::now();
    repeat(kTries);
    const std::chrono::duration<double> tried = Clock::now() - start;
    if (interrupted()) return;
    const int runs = std::max(3, static_cast<int>(seconds * kTries / tried.count()));
    const double warm = settled ? seconds / 2 : std::max(kSettle, seconds);
    const auto end = Clock::now() + std::chrono::duration<double>(warm);
    do {
      repeat((runs + 1) / 2);
    } while (Clock::now() < end && !interrupted());
    settled = true;
    const std::vector<double> timed = repeat(runs);
    if (interrupted()) return;
    task->seconds = timed;
  }
}

}  // namespace sonicmoe::cli
