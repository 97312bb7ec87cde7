#include "dense_bound.h"

#include <cmath>

namespace sonicmoe::cli {

std::vector<DenseBound::Gemm> DenseBound::gemms() const {
  std::vector<Gemm> all;
  for (const std::vector<Candidate>& ways : candidates_) {
    Gemm best{nullptr, ""};
    bool complete = true;
    for (const Candidate& candidate : ways) {
      const Task& task = groups_[candidate.group].tasks[candidate.task];
      complete = complete && !task.seconds.empty();
      if (best.task == nullptr || median(task.seconds) < median(best.task->seconds)) {
        best = {&task, candidate.way};
      }
    }
    if (complete && best.task != nullptr) all.push_back(best);
  }
  return all;
}

DenseBound::Seconds DenseBound::seconds() const {
  const auto all = gemms();
  const auto sum = [&all](std::size_t begin, std::size_t end) {
    if (all.size() < end) return std::nan("");
    double seconds = 0;
    for (std::size_t i = begin; i < end; ++i) seconds += median(all[i].task->seconds);
    return seconds;
  };
  return {sum(0, 2), sum(2, 6)};
}

}  // namespace sonicmoe::cli
