#include <cmath>
#include <cstdio>
#include <memory>

#include "dense_bound.h"
#include "interrupt.h"
#include "operations.h"
#include "subcommands.h"
#include "tensors.h"
#include "timing.h"
#include "verify/cases.h"

namespace sonicmoe::cli {
namespace {

constexpr const char* kDefaultShape = "4096,512,256,32,4";

constexpr const char* kHelp =
    "Times forward, backward and their sum on random data, and beside them, interleaved in\n"
    "the same process with the same threads, the dense bound: the six GEMMs as dense fp32\n"
    "GEMMs (OpenBLAS) with perfectly even experts, the faster of two ways to use the threads.\n"
    "Caches are flushed before each timing. ms: median, +-: median absolute deviation;\n"
    "TFLOP/s counts the GEMMs of the experts (6Rnd forward, 12Rnd backward, R rows, which is\n"
    "TK without token rounding; 4 and 8 without a gate; the router's own for router_*); GB/s\n"
    "counts every input and output once; 'of bound' is bound time / time.\n"
    "JSON: version, command, device, threads, seed, repeats, interrupted, layer {thiek,\n"
    "dtype, activation, w1_layout, router, norm_topk_probs, rounding {rule, tile} or null,\n"
    "bias, inference}, rows, results [{what, runs, ms, mad_ms, tflops, gbps, bound_ms,\n"
    "of_bound}], dense_bound [{gemm, way, runs, ms, mad_ms, tflops}], saved_bytes {x, preact,\n"
    "routing, logits, total}, workspace_bytes {forward, backward}. A figure that does not\n"
    "exist is null.";

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

Json print_rows(const std::vector<Row>& rows) {
  Json results = Json::array();
  std::printf("%-19s %10s %9s %9s %8s %10s %9s\n", "", "ms", "+-", "TFLOP/s", "GB/s", "bound ms",
              "of bound");
  for (const auto& [task, bound] : rows) {
    if (task.seconds.empty()) continue;
    const double seconds = median(task.seconds), spread = mad(task.seconds);
    const double tflops = task.flops / seconds * 1e-12, gbps = task.bytes / seconds * 1e-9;
    std::printf("%-19s %10s %9s %9s %8s %10s %9s\n", task.name.c_str(),
                cell(seconds * 1e3, "%.3f").c_str(), cell(spread * 1e3, "%.3f").c_str(),
                cell(tflops, "%.4f").c_str(), cell(gbps, "%.2f").c_str(),
                cell(bound * 1e3, "%.3f").c_str(), cell(bound / seconds, "%.2f").c_str());
    results.push_back({{"what", task.name},
                       {"runs", task.seconds.size()},
                       {"ms", seconds * 1e3},
                       {"mad_ms", spread * 1e3},
                       {"tflops", task.flops > 0 ? finite(tflops) : Json()},
                       {"gbps", finite(gbps)},
                       {"bound_ms", finite(bound * 1e3)},
                       {"of_bound", finite(bound / seconds)}});
  }
  return results;
}

Json print_bound(const DenseBound& bound, DType dtype) {
  Json list = Json::array();
  std::printf("\ndense bound: fp32 OpenBLAS, even experts%s\n",
              dtype == DType::f32 ? "" : " (there is no 2-byte OpenBLAS to bound this dtype with)");
  for (const auto& [task, way] : bound.gemms()) {
    const double seconds = median(task->seconds), spread = mad(task->seconds);
    const double tflops = task->flops / seconds * 1e-12;
    std::printf("%-19s %10.3f %9.3f %9s   %s\n", task->name.c_str(), seconds * 1e3, spread * 1e3,
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
  const auto rows = static_cast<double>(l.rows());
  const double flops = 2.0 * rows * static_cast<double>(desc.hidden) *
                       static_cast<double>(desc.preact_width() + desc.intermediate);
  const double preact_bytes = desc.inference ? 0
                                             : rows * static_cast<double>(desc.preact_width()) *
                                                   static_cast<double>(size_of(desc.dtype));
  const auto forward = [&plan, args = l.forward_args(), workspace] {
    return plan.forward(args, workspace);
  };
  const auto backward = [&plan, args = l.backward_args(), workspace] {
    return plan.backward(args, workspace);
  };
  std::vector<Group> groups(desc.inference ? 1 : 2);
  groups[0].tasks = {
      {.name = "forward",
       .run = forward,
       .flops = flops,
       .bytes = preact_bytes + total_bytes({&l.x, &l.router_w, &l.w1, &l.b1, &l.w2, &l.b2, &l.o,
                                            &l.logits, &l.counts, &l.routing})}};
  if (desc.inference) return groups;
  groups[1].tasks = {{.name = "backward",
                      .run = backward,
                      .flops = 2 * flops,
                      .bytes = preact_bytes + total_bytes({&l.x, &l.router_w, &l.w1, &l.w2, &l.b2,
                                                           &l.routing, &l.dout, &l.dx, &l.drouter_w,
                                                           &l.dw1, &l.db1, &l.dw2, &l.db2})}};
  return groups;
}

/// Forward plus backward of the same repeat.
Task sum(const Task& forward, const Task& backward) {
  Task total{.name = "total",
             .run = {},
             .flops = forward.flops + backward.flops,
             .bytes = forward.bytes + backward.bytes};
  for (std::size_t i = 0; i < backward.seconds.size(); ++i) {
    total.seconds.push_back(forward.seconds[i] + backward.seconds[i]);
  }
  return total;
}

std::vector<Row> make_rows(const std::vector<Group>& layer, const std::vector<Group>& operations,
                           const DenseBound& bound) {
  const auto [forward, backward] = bound.seconds();
  std::vector<Row> rows = {{layer[0].tasks[0], forward}};
  if (layer.size() > 1) {
    rows.push_back({layer[1].tasks[0], backward});
    rows.push_back({sum(layer[0].tasks[0], layer[1].tasks[0]), forward + backward});
  }
  for (const Group& group : operations) {
    rows.push_back({group.tasks[0]});
    for (const auto& gemm : bound.gemms()) {
      if (gemm.task->name == group.tasks[0].name) {
        rows.back().bound_seconds = median(gemm.task->seconds);
      }
    }
  }
  return rows;
}

int run_bench(Settings& settings, bool with_operations, int repeats) {
  settings.resolve();
  const LayerDesc& desc = settings.desc;
  const LayerPlan plan = settings.plan(desc, settings.layer_line());
  const LayerTensors tensors(desc, plan.saved_bytes(), settings.seed);
  const Buffer workspace(plan.workspace_bytes());
  // Backward reads what forward wrote, and so do the operations; and forward counts the rows.
  const Status status = plan.forward(tensors.forward_args(), workspace.workspace());
  if (!status.ok()) throw std::runtime_error(std::string("forward: ") + status.message());
  std::vector<Group> layer = layer_groups(plan, tensors, workspace.workspace());
  DenseBound bound(desc, tensors.rows(), settings.threads, settings.seed);
  std::unique_ptr<Operations> operations;
  if (with_operations) operations = std::make_unique<Operations>(settings, tensors);
  std::vector<Group> none;
  std::vector<Group>& operation_groups = operations ? operations->groups() : none;

  std::vector<Group*> groups;
  for (auto* list : {&layer, &bound.groups(), &operation_groups}) {
    for (Group& group : *list) groups.push_back(&group);
  }
  time_interleaved(groups, repeats, settings.threads);

  std::printf("sonicmoe %s bench %s --threads %d --seed %llu\n", version(),
              settings.layer_line().c_str(), settings.threads,
              static_cast<unsigned long long>(settings.seed));
  if (desc.rounding_tile > 0) {
    std::printf("%lld rows after token rounding, %lld before, room for %lld\n",
                static_cast<long long>(tensors.rows()),
                static_cast<long long>(desc.tokens * desc.top_k),
                static_cast<long long>(desc.rows()));
  }
  Json report = {{"version", version()},
                 {"command", "bench"},
                 {"device", device_name(settings.device)},
                 {"threads", settings.threads},
                 {"seed", settings.seed},
                 {"repeats", repeats},
                 {"interrupted", interrupted()},
                 {"layer", settings.layer_json()},
                 {"rows", tensors.rows()}};
  report["results"] = print_rows(make_rows(layer, operation_groups, bound));
  report["dense_bound"] = print_bound(bound, desc.dtype);
  report.update(print_memory(plan, desc.inference));
  write_json(settings.json, report);
  if (!interrupted()) return 0;
  std::printf("interrupted\n");
  return kInterruptedExit;
}

}  // namespace

Subcommand add_bench(CLI::App& app) {
  struct State {
    Settings settings;
    bool operations = false;
    int repeats = 20;
  };
  auto state = std::make_shared<State>();
  auto* parser = app.add_subcommand("bench", "Times the layer beside a dense-GEMM bound");
  parser->footer(kHelp);
  state->settings.add_to(*parser, kDefaultShape);
  std::vector<std::string> shapes;
  for (const auto& item : verify::benchmark_cases()) shapes.push_back(item.name);
  const auto set_shape = [state](const std::string& name) {
    LayerDesc& desc = state->settings.desc;
    const LayerDesc& wanted = verify::find_case(name)->desc;
    desc.tokens = wanted.tokens, desc.hidden = wanted.hidden;
    desc.intermediate = wanted.intermediate;
    desc.experts = wanted.experts, desc.top_k = wanted.top_k;
  };
  parser->add_option_function<std::string>("--case", set_shape, "--thiek of a published table")
      ->check(one_of(shapes))
      ->type_name(join(shapes))
      ->excludes(parser->get_option("--thiek"));
  parser->add_flag("--ops", state->operations, "Time each operation by itself, too")
      ->check(no_value());
  add_integer(*parser, "--repeats", state->repeats, 1, 1000000,
              "Timed repeats of everything (default: 20)");
  return {parser,
          [state] { return run_bench(state->settings, state->operations, state->repeats); }};
}

}  // namespace sonicmoe::cli
