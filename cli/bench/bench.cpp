#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/interrupt.h"
#include "cli/parsing.h"
#include "cli/subcommands.h"
#include "cli/tensors.h"
#include "cublas_bound.h"
#include "device_clock.h"
#include "experts_alone.h"
#include "openblas_bound.h"
#include "operations.h"
#include "testkit/cases.h"
#include "timing.h"

namespace sonicmoe::cli {
namespace {

constexpr const char* kDefaultShape = "4096,512,256,32,4";

constexpr const char* kHelp =
    "Times forward, backward and their sum on random data, and beside them, interleaved in\n"
    "the same process, the dense bound: the six GEMMs with perfectly even experts, each timed\n"
    "alone, the fastest of several ways: on the CPU fp32 OpenBLAS, experts in parallel or\n"
    "threads inside a GEMM; on CUDA cuBLAS in the layer's type, strided-batched or what\n"
    "cuBLASLt's heuristics propose. On the CPU forward and backward are the whole layer. On\n"
    "CUDA they start from given scores and experts: metadata, all kernels and all gradients,\n"
    "but no products of the router and no top-K, which layer_forward, layer_backward and layer\n"
    "add. Where the sum of dX adds the router's part, backward has it. rows_forward and\n"
    "rows_backward are the experts alone, on contiguous rows with scores. 'host' is how long\n"
    "the calls of layer keep the host, 'routing' all from logits to metadata. Times on CUDA are\n"
    "between two events.\n"
    "--steady-state times in thermal steady state: each operation by itself, the one with most\n"
    "work first, after that one has kept the chip busy for 5 s. A GEMM then runs at the clock\n"
    "that the power cap leaves.\n"
    "With --ops 'aggregate_o.in_layer' and 'aggregate_dx.in_layer' are (on CUDA) the sums right\n"
    "behind the products before them, as in a layer, instead of right behind a flush, and\n"
    "'aggregate_o.copy' is a copy that moves as many bytes as the sum, rows and out.\n"
    "'rows.up_proj' and the like are (on CUDA) operations of the experts alone.\n"
    "Caches are flushed before each timing. ms: median, +-: median absolute deviation;\n"
    "TFLOP/s counts the GEMMs of the experts (6Rnd forward, 12Rnd backward, R rows, which is\n"
    "TK without token rounding; 4 and 8 without a gate; the router's own for router_*); GB/s\n"
    "counts every input and output once. 'of dense' is the dense bound's time / time. 'of roof'\n"
    "(CUDA) is the least time that the operation's flops at the rate of the dense bound's fastest\n"
    "GEMM, or its bytes at the rate of a large copy in this run, allow, over its time.\n"
    "Threads of OpenMP spin while they wait: on a CPU that others use too, give fewer --threads\n"
    "or set OMP_WAIT_POLICY=passive.\n"
    "JSON: version, command, device, threads, multiprocessors (0: all), seed, skew, repeats,\n"
    "steady_state_ms, interrupted, layer {text, thiek, each field of the text}, rows, "
    "fewest_rows,\n"
    "most_rows (of an expert), results [{what, runs, ms, mad_ms, tflops, gbps, dense_bound_ms,\n"
    "of_dense_bound, of_roof}], copy_TBps, dense_bound [{gemm, way, runs, ms, mad_ms, tflops}],\n"
    "saved_bytes {x, preact, routing, logits, total}, workspace_bytes {forward, backward}, and\n"
    "with --beside beside [the same of each]. A figure that does not exist is null. With\n"
    "--configs: {version, command, device, configs [{config, ...}]}.";

struct BenchSettings : Settings {
  bool operations = false;
  bool every_kernel = false;
  std::vector<std::string> beside;  ///< options of other layers, timed in turn with this one
  int repeats = 20;
  int steady_state = 0;  ///< milliseconds
  double skew = 0;       ///< see LayerTensors
  std::string configs;
  bool on_cuda() const { return device.type == DeviceType::cuda; }
};

/// What no kernel passes, measured in the same run.
struct Roof {
  double flops = std::nan("");  ///< a second
  double bytes = std::nan("");  ///< a second

  double seconds(const Task& task) const {
    return std::fmax(task.flops / flops, task.bytes / bytes);
  }
};

struct Row {
  Task task;
  double bound_seconds = std::nan("");
};

std::string cell(double value, const char* format) {
  if (!std::isfinite(value) || value == 0) return "-";
  char text[32];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

Json print_rows(const std::vector<Row>& rows, const Roof& roof) {
  Json results = Json::array();
  std::printf("%-21s %10s %9s %9s %8s %10s %9s %8s\n", "", "ms", "+-", "TFLOP/s", "GB/s",
              "dense ms", "of dense", "of roof");
  for (const auto& [task, bound] : rows) {
    if (task.seconds.empty()) continue;
    const double seconds = median(task.seconds), spread = mad(task.seconds);
    const double tflops = task.flops / seconds * 1e-12, gbps = task.bytes / seconds * 1e-9;
    const double of_roof = task.on_host ? std::nan("") : roof.seconds(task) / seconds;
    std::printf("%-21s %10s %9s %9s %8s %10s %9s %8s\n", task.name.c_str(),
                cell(seconds * 1e3, "%.3f").c_str(), cell(spread * 1e3, "%.3f").c_str(),
                cell(tflops, "%.4f").c_str(), cell(gbps, "%.2f").c_str(),
                cell(bound * 1e3, "%.3f").c_str(), cell(bound / seconds, "%.2f").c_str(),
                cell(of_roof, "%.2f").c_str());
    results.push_back({{"what", task.name},
                       {"runs", task.seconds.size()},
                       {"ms", seconds * 1e3},
                       {"mad_ms", spread * 1e3},
                       {"tflops", task.flops > 0 ? finite(tflops) : Json()},
                       {"gbps", finite(gbps)},
                       {"dense_bound_ms", finite(bound * 1e3)},
                       {"of_dense_bound", finite(bound / seconds)},
                       {"of_roof", finite(of_roof)}});
  }
  return results;
}

Json print_bound(const DenseBound& bound) {
  Json list = Json::array();
  std::printf("\ndense bound: %s\n", bound.title().c_str());
  for (const auto& [task, way] : bound.gemms()) {
    const double seconds = median(task->seconds), spread = mad(task->seconds);
    const double tflops = task->flops / seconds * 1e-12;
    std::printf("%-21s %10.3f %9.3f %9s   %s\n", task->name.c_str(), seconds * 1e3, spread * 1e3,
                cell(tflops, "%.4f").c_str(), way);
    list.push_back({{"gemm", task->name},
                    {"way", way},
                    {"runs", task->seconds.size()},
                    {"ms", seconds * 1e3},
                    {"mad_ms", spread * 1e3},
                    {"tflops", finite(tflops)}});
  }
  return list;
}

Json print_memory(const LayerPlan& plan, bool inference) {
  const SavedBytes saved = plan.saved_bytes();
  const auto mib = [](std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  std::printf(
      "\nsaved for backward: x %.2f + preact %.2f + routing %.2f + logits %.2f = %.2f MiB\n",
      mib(saved.x), mib(saved.preact), mib(saved.routing), mib(saved.logits), mib(saved.total()));
  const std::size_t backward = inference ? 0 : plan.backward_workspace_bytes();
  std::printf("workspace: forward %.2f, backward %.2f MiB\n", mib(plan.forward_workspace_bytes()),
              mib(backward));
  return {
      {"saved_bytes",
       {{"x", saved.x},
        {"preact", saved.preact},
        {"routing", saved.routing},
        {"logits", saved.logits},
        {"total", saved.total()}}},
      {"workspace_bytes", {{"forward", plan.forward_workspace_bytes()}, {"backward", backward}}}};
}

/// Forward and backward, one group each. `l.counts` is right already.
std::vector<Group> layer_groups(const LayerPlan& plan, const LayerTensors& l, Workspace workspace) {
  const LayerDesc& desc = plan.desc();
  const auto rows = static_cast<double>(l.row_counts().all);
  const double flops = 2.0 * rows * static_cast<double>(desc.experts.hidden) *
                       static_cast<double>(desc.experts.preact_width() + desc.experts.intermediate);
  const double preact_bytes = desc.experts.keeps_preact()
                                  ? rows * static_cast<double>(desc.experts.preact_width()) *
                                        static_cast<double>(size_of(desc.experts.dtype))
                                  : 0;
  const auto forward = [&plan, args = l.forward_args(), workspace] {
    return plan.forward(args, workspace);
  };
  const auto backward = [&plan, args = l.backward_args(), workspace] {
    return plan.backward(args, workspace);
  };
  std::vector<Group> groups(desc.experts.inference ? 1 : 2);
  groups[0].tasks = {{.name = "forward",
                      .run = forward,
                      .flops = flops,
                      .bytes = preact_bytes + total_bytes({&l.x, &l.router_w, &l.ids, &l.weights,
                                                           &l.w1, &l.b1, &l.w2, &l.b2, &l.o,
                                                           &l.logits, &l.counts, &l.routing})}};
  if (desc.experts.inference) return groups;
  groups[1].tasks = {
      {.name = "backward",
       .run = backward,
       .flops = 2 * flops,
       .bytes = preact_bytes + total_bytes({&l.x, &l.router_w, &l.w1, &l.w2, &l.b2, &l.routing,
                                            &l.dout, &l.dx, &l.drouter_w, &l.dlogits, &l.dscores,
                                            &l.dw1, &l.db1, &l.dw2, &l.db2})}};
  return groups;
}

/// Forward plus backward of the same repeat, or of the n-th runs of both.
Task sum(const char* name, const Task& forward, const Task& backward) {
  Task total{.name = name,
             .run = {},
             .flops = forward.flops + backward.flops,
             .bytes = forward.bytes + backward.bytes};
  for (std::size_t i = 0; i < std::min(forward.seconds.size(), backward.seconds.size()); ++i) {
    total.seconds.push_back(forward.seconds[i] + backward.seconds[i]);
  }
  return total;
}

/// A copy of so many bytes within the device.
Group copy_group(const char* name, const Buffer& from, const Buffer& to, std::size_t bytes) {
  const auto run = [&from, &to, bytes] {
    DeviceClock::copy(to.data(), from.data(), bytes);
    return Status();
  };
  return {.tasks = {{.name = name, .run = run, .bytes = 2 * static_cast<double>(bytes)}}};
}

/// Everything that one shape is timed with, and the report.
class Bench {
 public:
  /// `beside`: of another layer, without the experts alone, copies and the bound.
  explicit Bench(const BenchSettings& settings, bool beside = false)
      : settings_(settings),
        beside_(beside),
        plan_(settings.plan(settings.desc, settings.layer_line())),
        tensors_(settings.desc, plan_.saved_bytes(), settings.seed, settings.skew, settings.device),
        workspace_(plan_.workspace_bytes(), settings.device) {
    // Backward reads what forward wrote, and so do the operations; and forward counts the rows.
    const Status status = plan_.forward(tensors_.forward_args(), workspace_.workspace());
    if (!status.ok()) throw std::runtime_error(std::string("forward: ") + status.message());
    layer_ = layer_groups(plan_, tensors_, workspace_.workspace());
    if (settings.operations || settings.on_cuda()) {
      operations_ = std::make_unique<Operations>(settings, plan_, tensors_, settings.every_kernel);
    }
    if (settings.on_cuda()) {
      add_cuda();
    } else if (!beside) {
      bound_ = std::make_unique<OpenblasBound>(settings.desc, tensors_.row_counts().all,
                                               settings.threads, settings.seed);
    }
  }

  /// Everything that is timed.
  std::vector<Group*> groups() {
    std::vector<Group*> groups;
    const auto add = [&](std::vector<Group>& list) {
      for (Group& group : list) groups.push_back(&group);
    };
    add(layer_);
    add(experts_);
    if (alone_) add(alone_->groups());
    if (bound_) add(bound_->groups());
    if (operations_ && settings_.operations) add(operations_->groups());
    if (alone_ && settings_.operations) add(alone_->operations());
    add(others_);
    return groups;
  }

  Json report() const {
    const LayerDesc& desc = settings_.desc;
    std::printf("sonicmoe %s bench %s --threads %d --seed %llu%s\n", version(),
                settings_.layer_line().c_str(), settings_.threads,
                static_cast<unsigned long long>(settings_.seed), skew_line().c_str());
    const RowCounts routed = tensors_.row_counts();
    if (settings_.skew > 0) {
      std::printf("rows of an expert: %d to %d, mean %.1f\n", routed.fewest, routed.most,
                  static_cast<double>(routed.all) / static_cast<double>(desc.router.experts));
    }
    if (desc.rounding.tile > 0) {
      std::printf("%lld rows after token rounding, %lld before, room for %lld\n",
                  static_cast<long long>(routed.all),
                  static_cast<long long>(desc.tokens * desc.router.top_k),
                  static_cast<long long>(desc.rows()));
    }
    Json report = {{"version", version()},
                   {"command", "bench"},
                   {"device", device_name(settings_.device)},
                   {"threads", settings_.threads},
                   {"multiprocessors", settings_.multiprocessors},
                   {"seed", settings_.seed},
                   {"skew", settings_.skew},
                   {"repeats", settings_.steady_state > 0 ? Json() : Json(settings_.repeats)},
                   {"steady_state_ms", settings_.steady_state},
                   {"interrupted", interrupted()},
                   {"layer", settings_.layer_json()},
                   {"rows", routed.all},
                   {"fewest_rows", routed.fewest},
                   {"most_rows", routed.most}};
    const Roof measured = roof();
    report["results"] = print_rows(rows(), measured);
    report["copy_TBps"] = finite(measured.bytes * 1e-12);
    if (bound_) {
      report["dense_bound"] = print_bound(*bound_);
    } else {
      report["dense_bound"] = Json::array();
      std::printf("\nno dense bound: %s\n", no_bound_.c_str());
    }
    report.update(print_memory(plan_, desc.experts.inference));
    return report;
  }

 private:
  std::string skew_line() const {
    return settings_.skew > 0 ? " --skew " + Json(settings_.skew).dump() : "";
  }

  void add_cuda() {
    experts_.push_back({.tasks = {operations_->forward()}});
    layer_[0].tasks[0].name = "layer_forward";
    std::vector<std::function<Status()>> calls = {layer_[0].tasks[0].run};
    if (layer_.size() > 1) {
      experts_.push_back({.tasks = {operations_->backward()}});
      layer_[1].tasks[0].name = "layer_backward";
      calls.push_back(layer_[1].tasks[0].run);
    }
    const auto call = [calls] {
      for (const auto& run : calls) {
        if (Status status = run(); !status.ok()) return status;
      }
      return Status();
    };
    others_.push_back({.tasks = {{.name = "host", .run = call, .on_host = true}}});
    others_.push_back({.tasks = {operations_->routing()}});
    if (beside_) return;
    alone_ = std::make_unique<ExpertsAlone>(settings_, tensors_);
    constexpr std::size_t kGigabyte = std::size_t{1} << 30;
    const LayerDesc& desc = settings_.desc;
    const auto values =
        static_cast<std::size_t>((tensors_.row_counts().all + desc.tokens) * desc.experts.hidden);
    const std::size_t summed = values * size_of(desc.experts.dtype) / 2;  // read and written
    const std::size_t most = std::max(kGigabyte, settings_.operations ? summed : 0);
    copy_from_ = Buffer(most, settings_.device);
    copy_to_ = Buffer(most, settings_.device);
    others_.push_back(copy_group("copy", copy_from_, copy_to_, kGigabyte));
    if (settings_.operations) {
      others_.push_back(copy_group("aggregate_o.copy", copy_from_, copy_to_, summed));
    }
    bound_ = CublasBound::make(settings_.desc, tensors_.row_counts().all, settings_.device,
                               settings_.seed, &no_bound_);
  }

  Roof roof() const {
    Roof out;
    if (!settings_.on_cuda()) return out;
    for (const Group& group : others_) {
      const Task& task = group.tasks[0];
      if (task.name == "copy") out.bytes = task.bytes / median(task.seconds);
    }
    if (!bound_) return out;
    for (const auto& gemm : bound_->gemms()) {
      out.flops = std::fmax(out.flops, gemm.task->flops / median(gemm.task->seconds));
    }
    return out;
  }

  std::vector<Row> rows() const {
    const auto [forward, backward] = bound_ ? bound_->seconds() : DenseBound::Seconds{kNone, kNone};
    std::vector<Row> rows;
    const auto add = [&](const std::vector<Group>& groups, const char* total, double one,
                         double two) {
      if (groups.empty()) return;
      rows.push_back({groups[0].tasks[0], one});
      if (groups.size() < 2) return;
      rows.push_back({groups[1].tasks[0], two});
      rows.push_back({sum(total, groups[0].tasks[0], groups[1].tasks[0]), one + two});
    };
    add(experts_, "total", forward, backward);
    add(layer_, settings_.on_cuda() ? "layer" : "total", forward, backward);
    if (alone_) add(alone_->groups(), "rows", forward, backward);
    if (operations_ && settings_.operations) {
      for (const Group& group : operations_->groups()) rows.push_back(operation_row(group));
    }
    if (alone_ && settings_.operations) {
      for (const Group& group : alone_->operations()) rows.push_back({group.tasks[0]});
    }
    for (const Group& group : others_) rows.push_back({group.tasks[0]});
    return rows;
  }

  Row operation_row(const Group& group) const {
    Row row{group.tasks[0]};
    if (!bound_) return row;
    for (const auto& gemm : bound_->gemms()) {
      if (gemm.task->name == row.task.name) row.bound_seconds = median(gemm.task->seconds);
    }
    return row;
  }

  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  const BenchSettings& settings_;
  bool beside_;
  LayerPlan plan_;
  LayerTensors tensors_;
  Buffer workspace_, copy_from_, copy_to_;
  std::vector<Group> layer_;    // the layer's two calls
  std::vector<Group> experts_;  // CUDA: without the router
  std::vector<Group> others_;   // CUDA: host time, routing, copy
  std::unique_ptr<Operations> operations_;
  std::unique_ptr<ExpertsAlone> alone_;  // CUDA
  std::unique_ptr<DenseBound> bound_;
  std::string no_bound_ = "only the first layer has one";
};

void set_shape(LayerDesc* desc, const LayerDesc& wanted) {
  desc->tokens = wanted.tokens, desc->experts.hidden = wanted.experts.hidden;
  desc->experts.intermediate = wanted.experts.intermediate;
  desc->router.experts = wanted.router.experts, desc->router.top_k = wanted.router.top_k;
}

Json run_one(const BenchSettings& settings) {
  // A report refers to its settings.
  std::vector<BenchSettings> all = {settings};
  for (const std::string& options : settings.beside) {
    all.push_back(settings);
    all.back().desc = with_options(settings.desc, options);
  }
  std::vector<std::unique_ptr<Bench>> benches;
  std::vector<Group*> groups;
  for (const BenchSettings& one : all) {
    benches.push_back(std::make_unique<Bench>(one, !benches.empty()));
    const std::vector<Group*> its = benches.back()->groups();
    groups.insert(groups.end(), its.begin(), its.end());
  }
  if (settings.steady_state > 0) {
    time_in_steady_state(groups, settings.steady_state * 1e-3, settings.device);
  } else {
    time_interleaved(groups, settings.repeats, settings.threads, settings.device);
  }
  Json report = benches[0]->report();
  for (std::size_t i = 1; i < benches.size(); ++i) {
    std::printf("\nbeside it, with %s\n", settings.beside[i - 1].c_str());
    report["beside"].push_back(benches[i]->report());
  }
  return report;
}

/// The benchmark's tensors are those of a layer with K experts a token and one W1.
void check_tensors(const LayerDesc& desc, const std::string& option) {
  if (desc.router.takes_lists()) {
    throw UsageError(option +
                     ": got router_input=lists, allowed: projection, logits, logits_and_ids, "
                     "ids_and_weights");
  }
  if (desc.experts.w1_layout == W1Layout::separate) {
    throw UsageError(option +
                     ": got w1_layout=separate, allowed: interleaved, concatenated, transposed, "
                     "transposed_interleaved");
  }
}

int run_bench(BenchSettings& settings) {
  settings.resolve();
  check_tensors(settings.desc, "--layer");
  for (const std::string& options : settings.beside) {
    check_tensors(with_options(settings.desc, options), "--beside");
  }
  if (settings.steady_state > 0 && !settings.on_cuda()) {
    throw UsageError("--steady-state: got --device cpu, allowed: --device cuda");
  }
  Json report;
  if (settings.configs.empty()) {
    report = run_one(settings);
  } else {
    report = {{"version", version()},
              {"command", "bench"},
              {"device", device_name(settings.device)},
              {"configs", Json::array()}};
    for (const auto& item : testkit::benchmark_cases()) {
      if (item.name == "cpu" || interrupted()) continue;
      set_shape(&settings.desc, item.desc);
      std::printf("\n== %s\n", item.name.c_str());
      Json one = {{"config", item.name}};
      one.update(run_one(settings));
      report["configs"].push_back(std::move(one));
      std::fflush(stdout);
    }
  }
  write_json(settings.json, report);
  if (!interrupted()) return 0;
  std::printf("interrupted\n");
  return kInterruptedExit;
}

}  // namespace

Subcommand add_bench(CLI::App& app) {
  auto settings = std::make_shared<BenchSettings>();
  auto* parser = app.add_subcommand("bench", "Times the layer beside a dense-GEMM bound");
  parser->footer(kHelp);
  settings->add_to(*parser, kDefaultShape);
  std::vector<std::string> shapes;
  for (const auto& item : testkit::benchmark_cases()) shapes.push_back(item.name);
  const auto set_case = [settings](const std::string& name) {
    set_shape(&settings->desc, testkit::find_case(name)->desc);
  };
  auto* one =
      parser->add_option_function<std::string>("--case", set_case, "--thiek of a published table");
  one->check(one_of(shapes))->type_name(join(shapes))->excludes(parser->get_option("--thiek"));
  one->excludes(parser->get_option("--layer"));
  parser->add_option("--configs", settings->configs, "All twelve shapes of published tables")
      ->check(one_of({"targets"}))
      ->type_name("targets")
      ->excludes(parser->get_option("--thiek"))
      ->excludes(parser->get_option("--layer"))
      ->excludes(one);
  parser->add_flag("--ops", settings->operations, "Time each operation by itself, too")
      ->check(no_value());
  parser
      ->add_flag("--every-kernel", settings->every_kernel,
                 "With --ops: time every kernel that can run a grouped GEMM, too")
      ->check(no_value())
      ->needs(parser->get_option("--ops"));
  parser
      ->add_option("--beside", settings->beside,
                   "The same layer with these options of --layer, too, timed in turn with it; may "
                   "be repeated")
      ->check(layer_text())
      ->type_name("'KEY=VALUE ...'")
      ->allow_extra_args(false);
  add_integer(*parser, "--repeats", settings->repeats, 1, 1000000,
              "Timed repeats of everything (default: 20)");
  add_integer(*parser, "--steady-state", settings->steady_state, 1, 60000,
              "CUDA: instead, repeat each operation by itself for so many milliseconds, after at "
              "least half of that, on a chip that has been busy for 5 s")
      ->excludes(parser->get_option("--repeats"));
  add_skew(*parser, settings->skew,
           "The i-th most popular expert's logits are this times ln i standard deviations lower "
           "(default: 0)");
  return {parser, [settings] { return run_bench(*settings); }};
}

}  // namespace sonicmoe::cli
