// What a plan on CUDA refuses, says, and takes from the device.
#include <gtest/gtest.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/kernel.h"
#include "sonicmoe/info.h"
#include "testkit/device_memory.h"
#include "testkit/run.h"
#include "tests/known_devices.h"
#include "tests/plain_layer.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

LayerDesc some_layer() {
  LayerDesc d;
  d.tokens = 64;
  d.experts.hidden = 64;
  d.experts.intermediate = 64;
  d.router.experts = 4;
  d.router.top_k = 2;
  return d;
}

void expect_refused(const LayerDesc& desc, Device device, const std::string& part) {
  const auto plan = make_plan(desc, device);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), StatusCode::unsupported);
  EXPECT_NE(std::string(plan.status().message()).find(part), std::string::npos)
      << plan.status().message();
}

TEST(CudaPlan, NamesTheCureForFp32) {
  LayerDesc d = some_layer();
  d.experts.dtype = DType::f32;
  expect_refused(d, kDevice, "dtype: got f32, allowed: bf16, f16");
}

TEST(CudaPlan, RefusesDevicesThatAreNotThere) {
  expect_refused(some_layer(), {DeviceType::cuda, 1000}, "device.index: got 1000, allowed: 0");
}

TEST(CudaPlan, DevicesAreListed) {
  bool found = false;
  for (const DeviceInfo& info : devices()) {
    if (info.device.type != DeviceType::cuda) continue;
    found = true;
    EXPECT_TRUE(info.usable) << info.reason;
    EXPECT_NE(info.details.find("SMs"), std::string::npos) << info.details;
  }
  EXPECT_TRUE(found);
}

TEST(CudaPlan, EveryOperationRunsOnCudaOnly) {
  const auto plan = make_plan(some_layer(), kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::string text = plan.value().explain();
  EXPECT_EQ(text.find("  cpu"), std::string::npos) << text;
  const std::string up_proj = made_for_hopper() ? "  sm90.up_proj" : "  sm80.up_proj";
  EXPECT_NE(text.find(up_proj), std::string::npos) << text;
}

TEST(CudaPlan, TraitsAreThoseOfTheDevice) {
  const DeviceTraits device = device_traits(kDevice);
  EXPECT_EQ(device.arch, kH100Sxm.arch);
  EXPECT_GE(device.multiprocessors, 2);
  EXPECT_GT(device.l2_bytes, 0);
  EXPECT_EQ(device.shared_bytes, kH100Sxm.shared_bytes);
  EXPECT_EQ(device.block_shared_bytes, kH100Sxm.block_shared_bytes);
}

TEST(CudaPlan, RefusesMultiprocessorsThatAreNotThere) {
  const int most = device_traits(kDevice).multiprocessors / 2 * 2;
  for (const int wanted : {-2, 1, 3, most + 1, most + 2}) {
    const auto plan = make_plan(some_layer(), kDevice, {.multiprocessors = wanted, .kernel = ""});
    ASSERT_FALSE(plan.ok());
    EXPECT_EQ(plan.status().code(), StatusCode::invalid_argument);
    EXPECT_EQ(std::string(plan.status().message()),
              "multiprocessors: got " + std::to_string(wanted) +
                  ", allowed: 0 (all) or even numbers from 2 to " + std::to_string(most));
  }
}

// A layer on one pair of multiprocessors, and on most of them.
TEST(CudaPlan, LeavesMultiprocessorsFree) {
  for (const int wanted : {2, 100}) {
    const Options options{.multiprocessors = wanted, .kernel = ""};
    const auto plan = make_plan(some_layer(), kDevice, options);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_NE(plan.value().explain().find(", " + std::to_string(wanted) + " multiprocessors\n"),
              std::string::npos);
    for (const DType type : kTypes) {
      for (const char* name : {"shape/large", "activation/swiglu-separate-bias", "given/hostile",
                               "router/topk_over_softmax-bias", "sums/topk"}) {
        const Case& c = case_named(name, type);
        SCOPED_TRACE(c.name + ", " + std::to_string(wanted));
        const Report report = check_layer(c, kDevice, options);
        EXPECT_TRUE(report.pass()) << report.text();
        const Problem problem = make_problem(c);
        const LayerRun first = run_layer(problem, kDevice, options);
        ASSERT_TRUE(first.status.ok()) << first.status.message();
        EXPECT_EQ(first_difference(first, run_layer(problem, kDevice, options)), "");
      }
    }
  }
}

// What is kept for backward is in the caller's tensors, scratch in his workspace: the device's free
// memory does not move while a layer runs.
TEST(CudaPlan, CallsTakeNoDeviceMemory) {
  for (const DType type : kTypes) {
    for (const char* name : {"shape/large", "activation/swiglu-separate-bias", "given/hostile",
                             "rounding/nearest_scores-topk_over_softmax_norm"}) {
      const PlainLayer layer(case_named(name, type), 1);
      const auto run = [&] {
        const Status forward = layer.plan.forward(layer.forward, layer.workspace);
        ASSERT_TRUE(forward.ok()) << forward.message();
        const Status backward = layer.plan.backward(layer.backward, layer.workspace);
        ASSERT_TRUE(backward.ok()) << backward.message();
      };
      run();  // loads the kernels
      ASSERT_TRUE(synchronize(kDevice).ok());
      const std::size_t before = free_bytes(kDevice);
      for (int i = 0; i < 20; ++i) run();
      ASSERT_TRUE(synchronize(kDevice).ok());
      EXPECT_EQ(free_bytes(kDevice), before) << name;
      EXPECT_EQ(layer.arena.damage(), "") << name;
    }
  }
}

// Nobody need ask CUDA again for an error that a call of theirs has returned.
TEST(CudaPlan, ErrorsOfOthersAreNotOurs) {
  const PlainLayer layer(case_named("router/topk_over_softmax-bias", DType::bf16), 1);
  ASSERT_THROW((void)allocate(kDevice, std::size_t{1} << 50), std::runtime_error);
  const Status forward = layer.plan.forward(layer.forward, layer.workspace);
  EXPECT_TRUE(forward.ok()) << forward.message();
  ASSERT_THROW((void)allocate(kDevice, std::size_t{1} << 50), std::runtime_error);
  const Status backward = layer.plan.backward(layer.backward, layer.workspace);
  EXPECT_TRUE(backward.ok()) << backward.message();
  EXPECT_TRUE(synchronize(kDevice).ok());
}

// PyTorch runs backward in a thread of its own, of which ours may be the first call of CUDA.
TEST(CudaPlan, NewThreadsMayCall) {
  const Case& c = case_named("router/topk_over_softmax-bias", DType::bf16);
  const PlainLayer here(c, 1), elsewhere(c, 1);
  const auto in_new_thread = [](auto call) {
    Status status;
    std::jthread([&] {
      status = call();
      if (status.ok()) status = synchronize(kDevice);
    }).join();
    return status;
  };
  ASSERT_TRUE(here.plan.forward(here.forward, here.workspace).ok());
  ASSERT_TRUE(here.plan.backward(here.backward, here.workspace).ok());
  ASSERT_TRUE(synchronize(kDevice).ok());
  const PlainLayer& e = elsewhere;
  const Status forward = in_new_thread([&] { return e.plan.forward(e.forward, e.workspace); });
  ASSERT_TRUE(forward.ok()) << forward.message();
  const Status backward = in_new_thread([&] { return e.plan.backward(e.backward, e.workspace); });
  ASSERT_TRUE(backward.ok()) << backward.message();
  for (const char* tensor : {"o", "preact", "dx", "dw1", "dw2"}) {
    EXPECT_EQ(e.arena.tensor(tensor, DType::bf16), here.arena.tensor(tensor, DType::bf16))
        << tensor;
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
