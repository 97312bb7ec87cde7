// Plans, statuses, names and the kernel list.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <set>
#include <string>

#include "core/kernel.h"
#include "core/ledger.h"
#include "cuda/sm90/tile_choice.h"
#include "known_devices.h"
#include "sonicmoe/sonicmoe.h"
#include "tile_times.h"

namespace sonicmoe {
namespace {

LayerDesc small(DType dtype) {
  LayerDesc d;
  d.tokens = 5;
  d.experts.hidden = 16;
  d.experts.intermediate = 8;
  d.router.experts = 4;
  d.router.top_k = 2;
  d.experts.dtype = dtype;
  return d;
}

TEST(Status, CarriesItsText) {
  EXPECT_TRUE(Status().ok());
  EXPECT_STREQ(Status().message(), "");
  const Status bad = Status::error(StatusCode::invalid_data, "x: got %d, allowed: %s", 3, "4");
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.code(), StatusCode::invalid_data);
  EXPECT_STREQ(bad.message(), "x: got 3, allowed: 4");
  const Status device = Status::device(700, "an illegal access");
  EXPECT_EQ(device.code(), StatusCode::device_error);
  EXPECT_EQ(device.device_code(), 700);
  EXPECT_NE(std::string(device.message()).find("an illegal access"), std::string::npos);
}

TEST(Status, CutsLongTexts) {
  const Status bad =
      Status::error(StatusCode::invalid_argument, "%s", std::string(300, 'x').c_str());
  EXPECT_EQ(std::string(bad.message()), std::string(255, 'x'));
}

TEST(Types, NamesAndParsingAreInverse) {
  for (int i = 0; i < 3; ++i) {
    DType parsed{};
    EXPECT_TRUE(parse(name(static_cast<DType>(i)), &parsed));
    EXPECT_EQ(parsed, static_cast<DType>(i));
  }
  DType dtype{};
  EXPECT_FALSE(parse("fp8", &dtype));
  EXPECT_STREQ(name(static_cast<DType>(7)), "?");
  EXPECT_STREQ(name(W1Layout::transposed_interleaved), "transposed_interleaved");
  EXPECT_STREQ(name(static_cast<W1Layout>(5)), "?");
  EXPECT_STREQ(name(static_cast<RouterOrder>(3)), "?");
  EXPECT_STREQ(name(static_cast<DeviceType>(2)), "?");
  EXPECT_STREQ(name(Recompute::preact), "preact");
  EXPECT_STREQ(name(static_cast<Recompute>(2)), "?");
  EXPECT_EQ(size_of(DType::f32), 4u);
  EXPECT_EQ(size_of(DType::bf16), 2u);
  EXPECT_EQ(size_of(DType::f16), 2u);
  EXPECT_EQ(size_of(static_cast<DType>(3)), 0u);
}

TEST(Ledger, BooksAlignedRegionsAndReusesThem) {
  Ledger ledger;
  EXPECT_EQ(ledger.book("a", 1), 0u);
  EXPECT_EQ(ledger.book("empty", 0), 256u);
  EXPECT_EQ(ledger.book("b", 257), 256u);
  const std::size_t shared = ledger.end();
  EXPECT_EQ(shared, 768u);
  EXPECT_EQ(ledger.book("c", 1000), shared);
  ledger.restart_at(shared);
  EXPECT_EQ(ledger.book("d", 10), shared);  // over c
  EXPECT_EQ(ledger.size(), 768u + 1024u);   // the highest end seen
  EXPECT_NE(ledger.explain("forward").find("768 + 1000 c"), std::string::npos)
      << ledger.explain("forward");
}

TEST(Explain, NamesEveryOperationRegionAndTerm) {
  LayerDesc desc = small(DType::f32);
  desc.experts.bias = true;
  const LayerPlan plan = make_plan(desc).value();
  const std::string text = plan.explain();
  for (const char* word :
       {"router_gemm", "top_k", "metadata", "up_proj", "down_proj", "aggregate", "down_proj_dgrad",
        "bias_grad", "score_grad", "down_proj_wgrad", "up_proj_wgrad", "up_proj_dgrad",
        ".up_proj: runs", "cpu-avx512bf16.up_proj: dtype: got f32, allowed: bf16", "expert_out",
        "dpreact", "preact 640"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word << "\n" << text;
  }
  EXPECT_NE(text.find(std::to_string(plan.forward_workspace_bytes())), std::string::npos);
}

TEST(Options, AKernelOrABackendCanBeForced) {
  Options options;
  options.kernel = "cpu";
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto backend = make_plan(small(dtype), {}, options);
    ASSERT_TRUE(backend.ok()) << backend.status().message();
    EXPECT_NE(backend.value().explain().find("cpu.up_proj: runs"), std::string::npos);
    for (const char* other : {"cpu-avx512.up_proj: runs", "cpu-avx512bf16.up_proj: runs"}) {
      EXPECT_EQ(backend.value().explain().find(other), std::string::npos);
    }
  }
  for (const char* name : {"cpu.router_gemm", "cpu.up_proj", "cpu.up_proj_wgrad"}) {
    options.kernel = name;
    const auto kernel = make_plan(small(DType::bf16), {}, options);
    ASSERT_TRUE(kernel.ok()) << kernel.status().message();
    EXPECT_NE(kernel.value().explain().find(std::string(name) + ": runs"), std::string::npos);
  }
  options.kernel = "cpu.up_proj.of_no_size";
  EXPECT_FALSE(make_plan(small(DType::bf16), {}, options).ok());
}

/// A product as CUDA chooses for it.
GroupedGemmDesc product(GemmOp op, std::int64_t tokens, std::int64_t rows, std::int64_t experts,
                        std::int64_t hidden, std::int64_t intermediate,
                        Activation activation = Activation::swiglu) {
  GroupedGemmDesc desc;
  desc.op = op;
  desc.tokens = tokens, desc.rows = rows, desc.experts = experts;
  desc.hidden = hidden, desc.intermediate = intermediate;
  desc.dtype = DType::bf16;
  desc.activation = activation;
  return desc;
}

// Which tile a CUDA kernel takes depends on shape and device alone, so that it can be looked up
// here.
TEST(Kernels, CudaTilesAreChosenByShape) {
  struct Row {
    GemmOp op;
    std::int64_t hidden, intermediate;
    const char* tile;
    Activation activation = Activation::swiglu;
    std::int64_t rows = 16384, experts = 32, tokens = 4096;
  };
  constexpr Activation kSwiglu = Activation::swiglu;
  constexpr Activation kGelu = Activation::gelu;
  constexpr Row kRows[] = {
      {GemmOp::up_proj, 1536, 256, "128x256", kSwiglu, 196608, 128},
      {GemmOp::up_proj, 4096, 1024, "128x256"},
      {GemmOp::up_proj, 2048, 64, "128x128"},
      {GemmOp::up_proj, 4096, 512, "128x256", kSwiglu, 262144, 128},
      {GemmOp::up_proj, 4096, 256, "128x256", kSwiglu, 524288, 256},
      {GemmOp::up_proj, 4096, 512, "128x256", Activation::geglu, 262144, 128},
      // 2.1 rounds or 4.2: three of wide tiles take longer than five of narrow ones.
      {GemmOp::up_proj, 1536, 256, "128x128"},
      {GemmOp::up_proj, 2048, 704, "128x128"},
      {GemmOp::up_proj, 1536, 256, "128x128", Activation::geglu},
      {GemmOp::up_proj, 1536, 256, "128x256", Activation::geglu, 196608, 128},
      {GemmOp::up_proj, 1536, 256, "128x256", kGelu, 196608, 128},
      {GemmOp::up_proj, 2048, 64, "128x128", kGelu},
      {GemmOp::up_proj, 2048, 128, "128x128", kGelu},
      // A round of narrow tiles takes longer where they read x from memory again.
      {GemmOp::up_proj, 4096, 320, "128x128", Activation::geglu, 147456, 256, 4096},
      {GemmOp::up_proj, 4096, 320, "128x256", Activation::geglu, 147456, 256, 24576},
      // Few rows an expert: narrow tiles unless they only make more rounds of the same.
      {GemmOp::up_proj, 4096, 640, "128x128", kSwiglu, 4096, 64},
      {GemmOp::up_proj, 1024, 320, "128x128", kSwiglu, 4096, 128},
      {GemmOp::up_proj, 1024, 704, "128x256", kSwiglu, 8192, 256},
      {GemmOp::up_proj, 2880, 512, "128x256", kSwiglu, 512, 128},
      // Too few tiles for all multiprocessors.
      {GemmOp::up_proj, 2048, 704, "128x128", kSwiglu, 8, 256},
      {GemmOp::up_proj, 5120, 512, "128x128", kSwiglu, 1024, 8},
      {GemmOp::up_proj, 1536, 320, "128x128", kSwiglu, 2048, 16},
      {GemmOp::down_proj, 768, 256, "128x192"},
      {GemmOp::down_proj, 4096, 1024, "128x256"},
      {GemmOp::down_proj, 1024, 1024, "128x256"},
      {GemmOp::down_proj, 4096, 2048, "128x256"},
      {GemmOp::down_proj, 2880, 2880, "128x192"},
      {GemmOp::down_proj_dgrad, 1536, 256, "128x256", kSwiglu, 196608, 128},
      {GemmOp::down_proj_dgrad, 1536, 256, "128x128"},
      {GemmOp::down_proj_dgrad, 2048, 64, "128x128"},
      {GemmOp::down_proj_dgrad, 1536, 256, "128x256", kGelu, 196608, 128},
      {GemmOp::down_proj_dgrad, 512, 512, "128x256", kSwiglu, 65536, 60},
      {GemmOp::down_proj_dgrad, 1024, 704, "128x128", kSwiglu, 8192, 256},
      {GemmOp::down_proj_dgrad, 4096, 640, "128x128", kSwiglu, 4096, 64},
      {GemmOp::down_proj_dgrad, 1024, 320, "128x256", kSwiglu, 4096, 128},
      {GemmOp::down_proj_dgrad, 5120, 512, "128x128", kSwiglu, 1024, 8},
      {GemmOp::up_proj_dgrad, 1536, 256, "128x192"},
      {GemmOp::up_proj_dgrad, 768, 1024, "128x192"},
      {GemmOp::up_proj_dgrad, 4096, 2048, "128x256"},
      {GemmOp::up_proj_dgrad, 1024, 512, "128x256"},
      {GemmOp::up_proj_dgrad, 512, 256, "128x256"},
      // One m block an expert, which a pair of CTAs splits along n: three narrow tiles take as long
      // as four.
      {GemmOp::down_proj, 512, 64, "128x256", kSwiglu, 8192, 128},
      {GemmOp::up_proj_dgrad, 512, 64, "128x256", kSwiglu, 8192, 128},
      {GemmOp::down_proj_wgrad, 1536, 256, "128x256"},
      {GemmOp::down_proj_wgrad, 2048, 64, "128x128"},
      {GemmOp::up_proj_wgrad, 1536, 256, "256x128"},
      {GemmOp::up_proj_wgrad, 2048, 128, "128x128"},
      // Hardly any rows.
      {GemmOp::down_proj_wgrad, 1536, 256, "128x128", kSwiglu, 512, 32},
      {GemmOp::down_proj_wgrad, 1536, 256, "128x256", kSwiglu, 513, 32},
      {GemmOp::up_proj_wgrad, 1536, 256, "128x128", kSwiglu, 512, 32},
      {GemmOp::up_proj_wgrad, 1536, 256, "256x128", kSwiglu, 513, 32},
  };
  for (const Row& row : kRows) {
    const GroupedGemmDesc desc = product(row.op, row.tokens, row.rows, row.experts, row.hidden,
                                         row.intermediate, row.activation);
    const auto choice = choose_kernel(desc, kH200, "");
    if (choice.walk.empty()) GTEST_SKIP() << "this build has no CUDA";
    ASSERT_NE(choice.kernel, nullptr) << choice.walk;
    const std::string name = choice.kernel->name;
    EXPECT_EQ(name.substr(name.rfind('.') + 1), row.tile)
        << row.hidden << ", " << row.intermediate << ", " << row.rows << " rows\n"
        << choice.walk;
  }
}

/// Hopper's kernels for it, device or not, must refuse it in these words; "": must take it.
template <class Desc>
void expect_of_cuda(const Desc& desc, const std::string& refusal) {
  const auto choice = choose_kernel(desc, kH200, "sm90");
  EXPECT_EQ(choice.kernel == nullptr, !refusal.empty()) << choice.walk;
  EXPECT_NE(choice.walk.find(refusal + "\n"), std::string::npos) << choice.walk;
}

// Rows are rounded up to pairs of 128, and a gather along K counts pieces of 16 bytes, in 32 bits.
TEST(Kernels, CudaRefusesWhatOffsetsCannotReach) {
  GroupedGemmDesc any;
  any.hidden = any.intermediate = 8;
  if (choose_kernel(any, kH200, "").walk.empty()) {
    GTEST_SKIP() << "this build has no CUDA";
  }
  const std::string most = ": got 2147483393, allowed: at most 2147483392 (on CUDA)";
  for (const GemmPass pass : {GemmPass::forward, GemmPass::dgrad, GemmPass::wgrad}) {
    RouterGemmDesc d{pass, 2147483392, 8, 1, DType::bf16};
    expect_of_cuda(d, "");
    ++d.tokens;
    expect_of_cuda(d, pass == GemmPass::wgrad ? "" : "tokens" + most);
  }
  for (const GemmOp op : {GemmOp::up_proj, GemmOp::down_proj, GemmOp::down_proj_dgrad,
                          GemmOp::up_proj_dgrad, GemmOp::down_proj_wgrad, GemmOp::up_proj_wgrad}) {
    SCOPED_TRACE(static_cast<int>(op));
    GroupedGemmDesc d = product(op, 16777215, 2147483392, 1, 2048, 8);
    expect_of_cuda(d, "");
    ++d.rows;
    expect_of_cuda(d, "rows" + most);
    --d.rows, ++d.tokens;
    const bool gathers_along_k = op == GemmOp::down_proj_wgrad || op == GemmOp::up_proj_wgrad;
    expect_of_cuda(d, gathers_along_k ? "tokens: got 16777216, allowed: at most 16777215 of 2048 "
                                        "elements (weight gradients on CUDA: 64 GiB)"
                                      : "");
  }
}

// By the model, which docs/findings/archive/router-gemm.md compares with measured times.
TEST(Kernels, CudaTilesOfTheRouterAreChosenByShape) {
  struct Row {
    std::int64_t tokens, hidden, experts;
    const char *forward, *wgrad;
  };
  constexpr Row kRows[] = {
      {24576, 1536, 128, "128", "128"},
      {40960, 768, 128, "128", "128"},
      {32768, 4096, 64, "64", "64"},
      {32768, 4096, 128, "128", "128"},
      {32768, 4096, 256, "256", "256"},
      // Few tokens: narrow tiles reach more multiprocessors.
      {4096, 2048, 128, "64", "64"},
      {8192, 2048, 256, "128", "128"},
      {2048, 4096, 256, "64", "128"},
      {512, 1536, 128, "64", "64"},
      // More tiles of dWr than pairs: one part, in rounds.
      {16384, 7168, 256, "256", "256"},
      {16384, 7168, 384, "256", "256"},
      {INT32_MAX - 255, 1 << 20, 65536, "256", "256"},
      {1, 8, 1, "64", "64"},
      {0, 8, 300, "256", "256"},
  };
  for (const Row& row : kRows) {
    for (const GemmPass pass : {GemmPass::forward, GemmPass::dgrad, GemmPass::wgrad}) {
      const RouterGemmDesc desc{pass, row.tokens, row.hidden, row.experts, DType::bf16};
      const auto choice = choose_kernel(desc, kH200, "");
      if (choice.walk.empty()) GTEST_SKIP() << "this build has no CUDA";
      ASSERT_NE(choice.kernel, nullptr) << choice.walk;
      const char* const tile = pass == GemmPass::forward ? row.forward
                               : pass == GemmPass::wgrad ? row.wgrad
                                                         : "256";  // all the same
      EXPECT_EQ(choice.kernel->name, std::string("sm90.router_gemm.") + tile)
          << row.tokens << ", " << row.hidden << ", " << row.experts << "\n"
          << choice.walk;
    }
  }
}

TEST(Kernels, CudaLoadsChunksThatExist) {
  EXPECT_EQ(cuda::last_chunk(8), 0);
  EXPECT_EQ(cuda::last_chunk(64), 0);
  EXPECT_EQ(cuda::last_chunk(72), 64);
  EXPECT_EQ(cuda::last_chunk(128), 64);
  EXPECT_EQ(cuda::last_chunk(320), 256);
  EXPECT_EQ(cuda::last_chunk(1 << 20), (1 << 20) - 64);
}

// Of x larger than twice L2, along 64 k blocks or more.
TEST(Kernels, CudaNarrowTilesTakeLongerByShape) {
  EXPECT_EQ(cuda::narrow_up_proj_percent(kH200, 100'000'000, 64), 57);
  EXPECT_EQ(cuda::narrow_up_proj_percent(kH200, 100'000'001, 63), 57);
  EXPECT_EQ(cuda::narrow_up_proj_percent(kH200, 100'000'001, 64), 70);
  EXPECT_EQ(cuda::narrow_up_proj_percent(kH200, INT64_MAX, INT64_MAX), 70);
}

// Pairs of CTAs begin one after the other where what they gather from comes from memory, and where
// there are tiles enough.
TEST(Kernels, CudaStartsAreSpreadByShape) {
  constexpr std::int64_t kMegabyte = 1'000'000;
  EXPECT_EQ(cuda::start_spread(kH200, 75 * kMegabyte, 12, 46'000), 23'000);
  EXPECT_EQ(cuda::start_spread(kH200, 50 * kMegabyte, 12, 46'000), 0);
  EXPECT_EQ(cuda::start_spread(kH200, 75 * kMegabyte, 7.9, 46'000), 0);
  EXPECT_EQ(cuda::start_spread(kH200, INT64_MAX, 1e9, 1e12), 1'000'000);
  EXPECT_EQ(cuda::start_spread(kH200, 0, 0, 0), 0);
}

// Where K is long and tiles are many; sooner with a counter that is already reset.
TEST(Kernels, CudaSchedulesDynamicallyByShape) {
  EXPECT_TRUE(cuda::schedules_dynamically(8, 32, true, false));
  EXPECT_FALSE(cuda::schedules_dynamically(8, 31, true, false));
  EXPECT_TRUE(cuda::schedules_dynamically(8, 24, true, true));
  EXPECT_FALSE(cuda::schedules_dynamically(8, 23, true, true));
  EXPECT_TRUE(cuda::schedules_dynamically(8, 16, false, false));
  EXPECT_FALSE(cuda::schedules_dynamically(8, 15, false, false));
  EXPECT_TRUE(cuda::schedules_dynamically(8, 12, false, true));
  EXPECT_FALSE(cuda::schedules_dynamically(8, 11, false, true));
  for (const bool cleared : {false, true}) {
    EXPECT_FALSE(cuda::schedules_dynamically(7.9, 1000, true, cleared));
    EXPECT_FALSE(cuda::schedules_dynamically(7.9, 1000, false, cleared));
  }
}

// In wide tiles SwiGLU and activations with members have kernels with a bias.
TEST(Kernels, CudaRefusesABiasInWideTiles) {
  GroupedGemmDesc desc = product(GemmOp::up_proj, 4096, 196608, 128, 1536, 256);
  desc.bias = true;
  const auto choose = [&] { return choose_kernel(desc, kH200, "sm90.up_proj.128x256"); };
  if (choose().walk.empty()) GTEST_SKIP() << "this build has no CUDA";
  EXPECT_NE(choose().kernel, nullptr) << choose().walk;
  for (const Activation activation :
       {Activation::geglu, Activation::geglu_tanh, Activation::reglu, Activation::relu,
        Activation::relu_sq, Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
    desc.activation = activation;
    EXPECT_EQ(choose().kernel, nullptr);
    const std::string reason =
        std::string("bias: got true, allowed: false for ") + name(activation);
    EXPECT_NE(choose().walk.find(reason), std::string::npos) << choose().walk;
  }
  for (const Activation activation : {Activation::swiglu_clamp_after, Activation::swiglu_oai,
                                      Activation::situ_glu, Activation::quick_geglu}) {
    desc.activation = activation;
    EXPECT_NE(choose().kernel, nullptr) << choose().walk;
    desc.activation.limit = activation == Activation::situ_glu ? HUGE_VALF : 7;
    if (activation != Activation::quick_geglu) {
      EXPECT_NE(choose().kernel, nullptr);
    }
  }
}

// Narrow tiles take transposed weights with every activation, wide ones with some.
TEST(Kernels, CudaRefusesTransposedWeightsInWideTiles) {
  for (const std::string op : {"up_proj", "down_proj_dgrad"}) {
    GroupedGemmDesc desc = product(op == "up_proj" ? GemmOp::up_proj : GemmOp::down_proj_dgrad,
                                   4096, 196608, 128, 1536, 256);
    const auto wide = [&] { return choose_kernel(desc, kH200, "sm90." + op + ".128x256"); };
    if (wide().walk.empty()) GTEST_SKIP() << "this build has no CUDA";
    for (const W1Layout layout : {W1Layout::transposed, W1Layout::transposed_interleaved}) {
      desc.w1_layout = layout;
      for (const Activation activation : {Activation::swiglu, Activation::swiglu_oai}) {
        desc.activation = activation;
        EXPECT_NE(wide().kernel, nullptr) << wide().walk;
        desc.activation.limit = 7;
        EXPECT_NE(wide().kernel, nullptr) << wide().walk;
      }
      for (const Activation activation : {Activation::geglu, Activation::reglu, Activation::relu,
                                          Activation::gelu_tanh, Activation::silu}) {
        desc.activation = activation;
        EXPECT_EQ(wide().kernel, nullptr);
        const std::string reason = std::string("w1_layout: got ") + name(layout);
        EXPECT_NE(wide().walk.find(reason), std::string::npos) << wide().walk;
        const auto narrow = choose_kernel(desc, kH200, "sm90." + op + ".128x128");
        EXPECT_NE(narrow.kernel, nullptr) << narrow.walk;
      }
    }
  }
}

// Over all six products the choice is within 5 % of the best of all compiled tiles.
TEST(Kernels, CudaTilesAreNearlyTheBest) {
  constexpr GemmOp kOps[6] = {GemmOp::up_proj,         GemmOp::down_proj,
                              GemmOp::down_proj_dgrad, GemmOp::up_proj_dgrad,
                              GemmOp::down_proj_wgrad, GemmOp::up_proj_wgrad};
  double worst = 0, sum = 0;
  for (const TileTimes& row : kTileTimes) {
    double chosen = 0, best = 0;
    std::string names;
    for (int op = 0; op < 6; ++op) {
      const GroupedGemmDesc desc = product(kOps[op], row.tokens, row.tokens * row.top_k,
                                           row.experts, row.hidden, row.intermediate);
      const auto choice = choose_kernel(desc, kH200, "");
      if (choice.walk.empty()) GTEST_SKIP() << "this build has no CUDA";
      ASSERT_NE(choice.kernel, nullptr) << choice.walk;
      const std::string name = choice.kernel->name;
      const std::string prefix = std::string("sm90.") + kTiles[op][0] + ".";
      int mine = 0, least = INT_MAX;
      for (std::size_t tile = 0; tile < std::size(row.ns[op]); ++tile) {
        if (kTiles[op][1 + tile] == nullptr) break;
        const int ns = row.ns[op][tile];
        if (name == prefix + kTiles[op][1 + tile]) mine = ns;
        least = std::min(least, ns);
      }
      ASSERT_GT(mine, 0) << name;
      chosen += mine;
      best += least;
      names += name + " " + std::to_string(static_cast<double>(mine) / least).substr(0, 5) +
               " of the best\n";
    }
    worst = std::max(worst, chosen / best);
    sum += chosen / best;
    std::string shape;
    for (const std::int64_t size :
         {row.tokens, row.hidden, row.intermediate, row.experts, row.top_k}) {
      shape += (shape.empty() ? "" : ",") + std::to_string(size);
    }
    EXPECT_LE(chosen, 1.05 * best) << shape << ": " << chosen / best << "\n" << names;
  }
  RecordProperty("worst", std::to_string(worst));
  constexpr std::size_t kShapes = std::size(kTileTimes);
  std::printf("worst of %zu shapes: %.3f, mean %.4f\n", kShapes, worst, sum / kShapes);
}

// Fewer threads need less scratch; the number of threads is part of the plan.
TEST(Options, ThreadsDecideTheWorkspace) {
  const auto bytes = [](int threads) {
    Options options;
    options.threads = threads;
    return make_plan(small(DType::f32), {}, options).value().workspace_bytes();
  };
  EXPECT_LT(bytes(1), bytes(2));
  EXPECT_EQ(bytes(3), bytes(3));
}

TEST(Info, ListsDevicesAndKernels) {
  const std::vector<DeviceInfo> all = devices();
  ASSERT_GE(all.size(), 2u);
  EXPECT_EQ(all[0].device.type, DeviceType::cpu);
  EXPECT_TRUE(all[0].usable);
  EXPECT_FALSE(all[0].name.empty());
  for (const DeviceInfo& device : all) EXPECT_EQ(device.usable, device.reason.empty());
  std::set<std::string> names, ops;
  for (const KernelInfo& kernel : kernels()) {
    EXPECT_TRUE(names.insert(kernel.name).second) << kernel.name;
    // "cpu.up_proj", "cuda.top_k", "sm90.up_proj.128x256": where, operation, which of several.
    const std::string rest = kernel.name.substr(kernel.name.find('.') + 1);
    EXPECT_EQ(rest.substr(0, rest.find('.')), kernel.op);
    EXPECT_EQ(kernel.name.starts_with("cpu"), kernel.device == DeviceType::cpu) << kernel.name;
    ops.insert(kernel.op);
  }
  for (const char* op : {"router_gemm", "top_k", "metadata", "up_proj", "down_proj",
                         "down_proj_dgrad", "up_proj_dgrad", "down_proj_wgrad", "up_proj_wgrad",
                         "bias_grad", "aggregate", "score_grad", "aux_loss"}) {
    EXPECT_TRUE(ops.contains(op)) << op;
  }
  EXPECT_STRNE(version(), "");
}

// There is no driver, or the build has no CUDA, or a device is too old: everyone says the same.
TEST(Devices, PlansRefuseWithTheReasonGiven) {
  for (const DeviceInfo& info : devices()) {
    EXPECT_EQ(info.usable, info.reason.empty());
    if (info.usable) continue;
    const std::string start = std::string("device: got ") + name(info.device.type) + ", allowed: ";
    EXPECT_EQ(info.reason.substr(0, start.size()), start);
    const auto plan = make_plan(small(DType::bf16), info.device);
    EXPECT_EQ(plan.status().code(), StatusCode::unsupported);
    EXPECT_EQ(plan.status().message(), info.reason);
  }
}

}  // namespace
}  // namespace sonicmoe
