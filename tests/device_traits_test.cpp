// The device as an argument: what is chosen for devices that are not there, and for a part of one.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include "core/device_code.h"
#include "core/op_plan.h"
#include "cuda/sm90/tile_choice.h"
#include "known_devices.h"
#include "sonicmoe/sonicmoe.h"
#include "tile_times.h"

namespace sonicmoe {
namespace {

/// An H100 of which Options::multiprocessors takes so many.
DeviceTraits part(int multiprocessors) {
  DeviceTraits device = kH100Sxm;
  EXPECT_TRUE(limit_multiprocessors(multiprocessors, &device).ok());
  return device;
}

bool has_cuda() {
  bool found = false;
  for_each_kernel([&](const auto& kernel) { found |= kernel.arch != 0; });
  return found;
}

/// The tile that a device takes, by the end of its kernel's name.
template <class Desc>
std::string tile_for(const Desc& desc, const DeviceTraits& device) {
  const auto choice = choose_kernel(desc, device, "");
  if (choice.kernel == nullptr) return choice.walk;
  const std::string name = choice.kernel->name;
  return name.substr(name.rfind('.') + 1);
}

/// T, d, n, E, K.
using Shape = std::array<std::int64_t, 5>;

GroupedGemmDesc product(GemmOp op, const Shape& shape) {
  const auto [tokens, hidden, intermediate, experts, top_k] = shape;
  GroupedGemmDesc desc;
  desc.op = op;
  desc.tokens = tokens, desc.rows = tokens * top_k;
  desc.hidden = hidden, desc.intermediate = intermediate;
  desc.experts = experts;
  desc.dtype = DType::bf16;
  return desc;
}

TEST(DeviceTraits, TilesAreChosenForTheDevice) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA";
  struct Row {
    GemmOp op;
    Shape shape;
    const char *sxm, *pcie, *hundred;  ///< of 132, 114 and 100 multiprocessors
  };
  const Row kRows[] = {
      // As many rounds, or as good ones, with all three.
      {GemmOp::up_proj, {24576, 1536, 256, 128, 8}, "128x256", "128x256", "128x256"},
      {GemmOp::up_proj, {32768, 4096, 512, 128, 8}, "128x256", "128x256", "128x256"},
      {GemmOp::down_proj, {2880, 2880, 2880, 32, 4}, "128x192", "128x192", "128x192"},
      {GemmOp::up_proj_wgrad, {8192, 2048, 128, 8, 2}, "128x128", "128x128", "128x128"},
      // The last round is full enough, or is not.
      {GemmOp::up_proj, {512, 7168, 1408, 16, 6}, "128x256", "128x128", "128x256"},
      {GemmOp::up_proj, {16384, 7168, 192, 16, 1}, "128x128", "128x128", "128x256"},
      {GemmOp::down_proj_dgrad, {8192, 2560, 192, 128, 8}, "128x256", "128x128", "128x256"},
      {GemmOp::down_proj_dgrad, {8192, 7168, 512, 64, 2}, "128x128", "128x256", "128x256"},
  };
  for (const Row& row : kRows) {
    const GroupedGemmDesc desc = product(row.op, row.shape);
    SCOPED_TRACE(std::string(op_name(desc)) + " " + std::to_string(desc.tokens));
    EXPECT_EQ(tile_for(desc, kH100Sxm), row.sxm);
    EXPECT_EQ(tile_for(desc, kH200), row.sxm);
    EXPECT_EQ(tile_for(desc, kH100Pcie), row.pcie);
    EXPECT_EQ(tile_for(desc, part(114)), row.pcie);
    EXPECT_EQ(tile_for(desc, part(100)), row.hundred);
  }
}

TEST(DeviceTraits, TilesOfTheRouterAreChosenForTheDevice) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA";
  struct Row {
    GemmPass pass;
    std::int64_t tokens, hidden, experts;
    const char *sxm, *pcie, *hundred;
  };
  const Row kRows[] = {
      {GemmPass::forward, 24576, 1536, 128, "128", "128", "128"},
      {GemmPass::forward, 4096, 7168, 256, "64", "128", "128"},
      {GemmPass::wgrad, 4096, 2048, 128, "64", "128", "128"},
      {GemmPass::wgrad, 2048, 1536, 160, "64", "64", "128"},
  };
  for (const Row& row : kRows) {
    const RouterGemmDesc desc{row.pass, row.tokens, row.hidden, row.experts, DType::bf16};
    EXPECT_EQ(tile_for(desc, kH100Sxm), row.sxm) << row.tokens;
    EXPECT_EQ(tile_for(desc, kH200), row.sxm) << row.tokens;
    EXPECT_EQ(tile_for(desc, kH100Pcie), row.pcie) << row.tokens;
    EXPECT_EQ(tile_for(desc, part(100)), row.hundred) << row.tokens;
  }
}

// Their L2 differs, but the models count with no more than they were fitted with.
TEST(DeviceTraits, H100AndH200ChooseAlike) {
  EXPECT_EQ(cuda::counted_l2(kH100Sxm), 50'000'000);
  EXPECT_EQ(cuda::counted_l2(kH200), 50'000'000);
  EXPECT_EQ(cuda::counted_l2(like(kH100Sxm, 132, 40 << 20)), 40 << 20);
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA";
  for (const TileTimes& shape : kTileTimes) {
    for (const GemmOp op :
         {GemmOp::up_proj, GemmOp::down_proj, GemmOp::down_proj_dgrad, GemmOp::up_proj_dgrad,
          GemmOp::down_proj_wgrad, GemmOp::up_proj_wgrad}) {
      const GroupedGemmDesc desc =
          product(op, {shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k});
      EXPECT_EQ(tile_for(desc, kH100Sxm), tile_for(desc, kH200)) << shape.tokens;
    }
  }
}

// Where x is more than twice the L2 that there is, a round of up_proj's narrow tiles takes longer.
TEST(DeviceTraits, LessL2IsFullSooner) {
  constexpr DeviceTraits kHalf = like(kH100Sxm, 132, 25 << 20);
  EXPECT_EQ(cuda::narrow_up_proj_percent(kH100Sxm, 67'000'000, 64), 57);
  EXPECT_EQ(cuda::narrow_up_proj_percent(kHalf, 67'000'000, 64), 70);
  EXPECT_EQ(cuda::start_spread(kH100Sxm, 33'000'000, 12, 46'000), 0);
  EXPECT_EQ(cuda::start_spread(kHalf, 33'000'000, 12, 46'000), 23'000);
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA";
  GroupedGemmDesc desc = product(GemmOp::up_proj, {8192, 4096, 320, 256, 18});
  desc.activation = Activation::geglu;
  EXPECT_EQ(tile_for(desc, kH100Sxm), "128x128");
  EXPECT_EQ(tile_for(desc, kHalf), "128x256");
}

// Fewer multiprocessors: more rounds, no more parts of the tokens.
TEST(DeviceTraits, FewerMultiprocessorsMakeMoreRounds) {
  for (const TileTimes& shape : kTileTimes) {
    const std::int64_t rows = shape.tokens * shape.top_k;
    const double of_all = cuda::rounds(kH100Sxm, rows, shape.experts, 3);
    for (int count = 2; count < 132; count += 2) {
      const DeviceTraits less = like(kH100Sxm, count, kH100Sxm.l2_bytes);
      const DeviceTraits more = like(kH100Sxm, count + 2, kH100Sxm.l2_bytes);
      EXPECT_NEAR(cuda::rounds(less, rows, shape.experts, 3) * count, of_all * 132, 1e-6 * rows);
      for (const int width : {64, 128, 256}) {
        const auto split = [&](const DeviceTraits& device) {
          return cuda::token_split(device, shape.tokens, shape.hidden, shape.experts, width, 64);
        };
        EXPECT_LE(split(less).parts, split(more).parts);
        EXPECT_GE(cuda::logits_cost(less, shape.tokens, shape.experts, width),
                  cuda::logits_cost(more, shape.tokens, shape.experts, width));
      }
    }
  }
}

// The order of the sums over tokens depends on it: docs/numerics.md.
TEST(DeviceTraits, TokensAreSplitForTheDevice) {
  const auto parts = [](const DeviceTraits& device) {
    return cuda::token_split(device, 24576, 1536, 128, 128, 64).parts;
  };
  EXPECT_EQ(parts(kH100Sxm), 11);
  EXPECT_EQ(parts(kH200), 11);
  EXPECT_EQ(parts(kH100Pcie), 9);
  EXPECT_EQ(parts(part(100)), 8);
  EXPECT_EQ(parts(part(2)), 1);
}

TEST(DeviceTraits, MultiprocessorsAreLimited) {
  const auto refusal = [](int wanted, DeviceTraits device) {
    const int before = device.multiprocessors;
    const Status status = limit_multiprocessors(wanted, &device);
    EXPECT_EQ(device.multiprocessors, status.ok() && wanted != 0 ? wanted : before);
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::invalid_argument);
    return std::string(status.message());
  };
  for (const int wanted : {0, 2, 100, 132}) EXPECT_EQ(refusal(wanted, kH100Sxm), "");
  for (const int wanted : {-2, 1, 3, 133, 134}) {
    EXPECT_EQ(refusal(wanted, kH100Sxm), "multiprocessors: got " + std::to_string(wanted) +
                                             ", allowed: 0 (all) or even numbers from 2 to 132");
  }
  EXPECT_EQ(refusal(0, like(kH100Sxm, 113, 0)), "");
  EXPECT_EQ(refusal(113, like(kH100Sxm, 113, 0)),
            "multiprocessors: got 113, allowed: 0 (all) or even numbers from 2 to 112");
  EXPECT_EQ(refusal(0, {}), "");
  EXPECT_EQ(refusal(2, {}), "multiprocessors: got 2, allowed: 0 (on the CPU)");
}

TEST(DeviceTraits, TheListSaysWhichArchitecturesRun) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA";
  for (const int arch : {80, 86, 89, 90, 100, 103, 120}) EXPECT_EQ(architecture_reason(arch), "");
  const std::string reason = architecture_reason(75);
  EXPECT_NE(reason.find("compute capability 7.5, allowed: 8.0 or later"), std::string::npos)
      << reason;
  EXPECT_NE(architecture_reason(0), "");  // the CPU's kernels do not count
  const auto choice = choose_kernel(TopKDesc{}, DeviceTraits{.arch = 75}, "");
  EXPECT_EQ(choice.kernel, nullptr);
  EXPECT_EQ(choice.walk, "");
}

TEST(DeviceTraits, DeviceCodeRunsOnWhatItWasCompiledFor) {
  const std::string all = "80,90a,100,120";
  for (const int arch : {80, 86, 89, 90, 100, 103, 120, 121}) {
    EXPECT_EQ(device_code_reason(all, arch), "") << arch;
  }
  for (const int arch : {75, 110}) EXPECT_NE(device_code_reason(all, arch), "") << arch;
  for (const int arch : {80, 89, 91, 100}) EXPECT_NE(device_code_reason("90a", arch), "") << arch;
  for (const int arch : {80, 86, 90, 120}) EXPECT_EQ(device_code_reason("80-virtual", arch), "");
  EXPECT_NE(device_code_reason("86", 80), "");
  EXPECT_EQ(device_code_reason("86,90-virtual,90a", 75),
            "device: got cuda of compute capability 7.5, allowed: 8.6 to 8.9, 9.0 or later, 9.0 "
            "(what this build has device code for; SONICMOE_CUDA_ARCHITECTURES chooses)");
}

// Hopper has kernels of its own, and every other GPU the portable ones. up_proj has a wide tile,
// too, where a thread block may have 192 KiB of shared memory, sums are long and wide tiles end no
// later.
TEST(DeviceTraits, EveryGpuSinceAmpereHasKernels) {
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA";
  struct Row {
    GemmOp op;
    Shape shape;
    const char *a100, *small, *b200;  ///< small: L40S, RTX 4090 and RTX 5090
  };
  const Row kRows[] = {
      {GemmOp::up_proj, {24576, 1536, 256, 128, 8}, "128x128", "128x128", "128x128"},
      {GemmOp::up_proj, {24576, 2048, 256, 128, 8}, "128x128", "128x128", "128x256"},
      {GemmOp::up_proj, {512, 7168, 1408, 16, 6}, "128x128", "128x128", "128x256"},
      {GemmOp::up_proj, {256, 2048, 512, 8, 2}, "128x128", "128x128", "128x128"},  // few tiles
      {GemmOp::up_proj,
       {8192, 2048, 192, 128, 8},
       "128x128",
       "128x128",
       "128x128"},  // a quarter of two wide tiles lies past n
      {GemmOp::down_proj, {4096, 2048, 768, 128, 8}, "128x128", "128x128", "128x128"},
      {GemmOp::down_proj_dgrad, {8192, 2560, 192, 128, 8}, "128x128", "128x128", "128x128"},
      {GemmOp::up_proj_dgrad, {256, 1024, 512, 8, 2}, "128x128", "128x128", "128x128"},
      {GemmOp::up_proj_wgrad, {8192, 2048, 128, 8, 2}, "128x128", "128x128", "128x128"},
      {GemmOp::down_proj_wgrad, {8192, 2048, 128, 8, 2}, "128x128", "128x128", "128x128"},
  };
  const auto name_for = [](const GroupedGemmDesc& desc, const DeviceTraits& device) {
    const auto choice = choose_kernel(desc, device, "");
    return choice.kernel == nullptr ? choice.walk : std::string(choice.kernel->name);
  };
  for (const Row& row : kRows) {
    const GroupedGemmDesc desc = product(row.op, row.shape);
    const std::string head = std::string("sm80.") + op_name(desc) + ".";
    SCOPED_TRACE(head + std::to_string(desc.tokens));
    EXPECT_EQ(name_for(desc, kA100), head + row.a100);
    for (const DeviceTraits& small : {kL40S, kRtx4090, kRtx5090}) {
      EXPECT_EQ(name_for(desc, small), head + row.small);
    }
    EXPECT_EQ(name_for(desc, kB200), head + row.b200);
    EXPECT_EQ(name_for(desc, kH200).substr(0, 5), "sm90.");
  }
  for (const DeviceTraits& device : {kA100, kL40S, kB200, kRtx5090}) {
    EXPECT_STREQ(choose_kernel(RouterGemmDesc{.experts = 8}, device, "").kernel->name,
                 "sm80.router_gemm");
    EXPECT_STREQ(choose_kernel(MetadataDesc{}, device, "").kernel->name, "cuda.metadata");
  }
}

TEST(DeviceTraits, KernelsAreNamedByArchitecture) {
  constexpr const char* kUpProj = "sm90.up_proj.128x256";
  for (const char* wanted : {"", "cuda", "sm90", "sm90.up_proj", kUpProj}) {
    EXPECT_TRUE(kernel_matches(wanted, kUpProj, 90)) << wanted;
  }
  for (const char* wanted : {"cpu", "cuda.up_proj", "sm9", "sm90.", "sm90.up_proj.128", "sm80"}) {
    EXPECT_FALSE(kernel_matches(wanted, kUpProj, 90)) << wanted;
  }
  EXPECT_TRUE(kernel_matches("cpu", "cpu.up_proj", 0));
  EXPECT_FALSE(kernel_matches("cpu", "cpu-avx512.up_proj", 0));
  EXPECT_FALSE(kernel_matches("cuda", "cpu.up_proj", 0));
  if (!has_cuda()) GTEST_SKIP() << "this build has no CUDA";
  EXPECT_NE(choose_kernel(MetadataDesc{}, kH200, "cuda").kernel, nullptr);
  EXPECT_NE(choose_kernel(MetadataDesc{}, kH200, "cuda.metadata").kernel, nullptr);
  EXPECT_EQ(choose_kernel(MetadataDesc{}, kH200, "sm90").kernel, nullptr);
}

}  // namespace
}  // namespace sonicmoe
