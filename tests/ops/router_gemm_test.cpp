// Bit for bit: every kernel of the router's three products on small integers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sonicmoe/info.h"
#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/inputs.h"
#include "testkit/oracle.h"
#include "tests/device.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

/// Integers from -largest to largest, all the same whatever the type.
Tensor integers(std::int64_t size, std::int64_t seed, std::int64_t largest = 2) {
  const Random random(seed, 5);
  Tensor values;
  for (std::int64_t i = 0; i < size; ++i) {
    values.push_back(static_cast<double>(random.below(i, 2 * largest + 1) - largest));
  }
  return values;
}

/// What a pass writes; `sums` are the gradient of a bias.
struct Product {
  Tensor out, sums;
  bool operator==(const Product&) const = default;
};

/// What a plan of this kernel gives, twice the same; nothing if it is not for such sizes.
Product run(const RouterGemmDesc& desc, const std::string& kernel, const Tensor& x, const Tensor& w,
            const Tensor& dlogits, const Tensor& bias = {}) {
  Options options = kChecked;
  options.kernel = kernel;
  options.threads = 2;
  const auto plan = make_plan(desc, kDevice, options);
  if (plan.status().code() == StatusCode::unsupported) return {};
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  if (!plan.ok()) return {};
  Arena arena(kDevice);
  RouterGemmArgs args;
  const std::int64_t t = desc.tokens, d = desc.hidden, e = desc.experts;
  if (desc.pass != GemmPass::dgrad) args.x = arena.input("x", x, desc.dtype);
  if (desc.pass != GemmPass::wgrad) args.w = arena.input("w", w, desc.w_dtype());
  if (desc.pass != GemmPass::forward) {
    args.dlogits = arena.input("dlogits", dlogits, desc.logits_dtype());
  }
  DType type = desc.dtype;
  bool sums = false;
  switch (desc.pass) {
    case GemmPass::forward:
      type = desc.logits_dtype();
      args.bias = static_cast<const float*>(arena.input("bias", bias, DType::f32));
      args.logits = arena.output("out", t * e, type);
      break;
    case GemmPass::dgrad:
      args.dx = arena.output("out", t * d, type);
      break;
    case GemmPass::wgrad:
      type = desc.w_dtype();
      args.dw = arena.output("out", e * d, type);
      sums = desc.bias;
      if (sums) args.dbias = arena.output_float("sums", e);
      break;
  }
  const std::size_t bytes = plan.value().workspace_bytes();
  const Workspace workspace{arena.output("workspace", bytes, 256), bytes};
  const auto call = [&] {
    const Status status = plan.value().run(args, workspace);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(arena.damage(), "");
    return Product{arena.tensor("out", type), sums ? arena.tensor("sums", DType::f32) : Tensor{}};
  };
  const Product out = call();
  EXPECT_EQ(call(), out);
  if (sums) {  // without the other gradient
    args.dw = nullptr;
    EXPECT_EQ(call().sums, out.sums);
  }
  return out;
}

class ExactRouterGemm : public testing::TestWithParam<KernelInfo> {
 protected:
  /// False if this kernel is not for this type or processor.
  static bool runs_as(DType dtype) {
    Options options;
    options.kernel = GetParam().name;
    return make_plan(RouterGemmDesc{GemmPass::forward, 1, 8, 1, dtype}, kDevice, options).ok();
  }

  static void expect_exact(std::int64_t t, std::int64_t d, std::int64_t e, DType dtype) {
    const Tensor x = integers(t * d, 1), w = integers(e * d, 2), g = integers(t * e, 3);
    SCOPED_TRACE("tokens " + std::to_string(t) + ", hidden " + std::to_string(d) + ", experts " +
                 std::to_string(e) + ", " + name(dtype));
    const auto expect = [&](GemmPass pass, const Tensor& expected) {
      const Tensor out = run({pass, t, d, e, dtype}, GetParam().name, x, w, g).out;
      // Of the products dx alone may be refused, on the CPU, for an odd number of experts.
      if (kOnCpu && pass == GemmPass::dgrad && e % 2 != 0 && out.empty()) return;
      EXPECT_EQ(out, expected) << "pass " << static_cast<int>(pass);
    };
    // In fp32, too, sums of integers are exact, in any order; what is stored is rounded once.
    LayerDesc layer;
    layer.tokens = t, layer.experts.hidden = d, layer.router.experts = e,
    layer.experts.dtype = dtype;
    const Oracle oracle(layer, Precision::rounded);
    expect(GemmPass::forward, oracle.logits(x, w));
    expect(GemmPass::dgrad, oracle.router_dx(g, w));
    expect(GemmPass::wgrad, oracle.router_dw(g, x));
  }

  static constexpr std::int64_t kLargestSum = 1 << 23;  ///< fp32 and tensor cores have it exactly

  /// With a bias, and with numbers of which fp32 needs two 16-bit parts: up to 15 bits, which are 8
  /// and 7 of bf16 or 11 and 4 of fp16, and fewer in long sums. Both operands of a product never
  /// need them, for the product of two small parts is left out.
  static void expect_exact_parts(std::int64_t t, std::int64_t d, std::int64_t e, DType dtype,
                                 bool f32_logits, bool f32_w, bool wide_w, bool wide_dlogits) {
    const std::int64_t wide = std::min<std::int64_t>(20000, kLargestSum / (2 * d));
    // 16-bit logits need more bits than they have, so that it shows when they are rounded.
    const std::int64_t narrow = f32_logits ? 2 : 100;
    const Tensor x = integers(t * d, 1), w = integers(e * d, 2, wide_w ? wide : narrow);
    const Tensor g = integers(t * e, 3, wide_dlogits ? wide : 2);
    const Tensor bias = integers(e, 4, f32_logits ? wide : narrow);
    SCOPED_TRACE(testing::Message() << "tokens " << t << ", hidden " << d << ", experts " << e
                                    << ", " << name(dtype) << ", f32 " << f32_logits << f32_w);
    LayerDesc layer;
    layer.tokens = t, layer.experts.hidden = d, layer.router.experts = e,
    layer.experts.dtype = dtype;
    layer.router.f32_logits = f32_logits;
    layer.router.f32_router_w = f32_w;
    const Oracle oracle(layer, Precision::rounded);
    const auto expect = [&](GemmPass pass, const Product& expected) {
      const RouterGemmDesc desc{pass, t, d, e, dtype, true, f32_logits, f32_w};
      const Product out = run(desc, GetParam().name, x, w, g, bias);
      // On the CPU one kernel takes tensors of two types, and some refuse an odd number of experts.
      if (kOnCpu && out.out.empty()) return;
      EXPECT_EQ(out, expected) << "pass " << static_cast<int>(pass);
    };
    expect(GemmPass::forward, {oracle.logits(x, w, bias), {}});
    expect(GemmPass::dgrad, {oracle.router_dx(g, w), {}});
    expect(GemmPass::wgrad, {oracle.router_dw(g, x), oracle.logit_bias_grad(g)});
  }
};

TEST_P(ExactRouterGemm, BiasAndFloats) {
  struct Size {
    std::int64_t tokens, hidden, experts;
  };
  constexpr Size kSizes[] = {{1, 8, 1},      {0, 16, 3},     {63, 72, 7},    {65, 136, 65},
                             {129, 256, 72}, {257, 264, 63}, {70, 48, 256},  {33, 16, 257},
                             {2100, 16, 60}, {70, 520, 65},  {130, 1096, 17}};
  for (const DType dtype : kTypes) {
    if (!runs_as(dtype)) continue;
    for (const auto& [t, d, e] : kSizes) {
      expect_exact_parts(t, d, e, dtype, false, false, false, false);
      expect_exact_parts(t, d, e, dtype, true, false, false, true);
      expect_exact_parts(t, d, e, dtype, true, true, true, false);
      expect_exact_parts(t, d, e, dtype, true, true, false, true);
    }
  }
}

// Weights of up to 2^19 and 2^18, of which bf16 needs three parts.
TEST_P(ExactRouterGemm, ThreeParts) {
  for (const DType dtype : kTypes) {
    if (!runs_as(dtype)) continue;
    for (const std::int64_t d : {8, 16}) {
      constexpr std::int64_t kTokens = 130;
      for (const std::int64_t e : {1, 16, 17, 63, 65, 128, 257}) {
        const Tensor x = integers(kTokens * d, 1), bias = integers(e, 4, 1000);
        Tensor w = integers(e * d, 2, kLargestSum / (2 * d));
        // fp16 ends at 65504. Two of its parts have 22 bits, so its third one is 0 here.
        if (dtype == DType::f16) std::ranges::for_each(w, [](double& v) { v = std::ldexp(v, -4); });
        LayerDesc layer;
        layer.tokens = kTokens, layer.experts.hidden = d, layer.router.experts = e,
        layer.experts.dtype = dtype;
        layer.router.f32_logits = layer.router.f32_router_w = true;
        const RouterGemmDesc desc{GemmPass::forward, kTokens, d, e, dtype, true, true, true};
        const Tensor out = run(desc, GetParam().name, x, w, {}, bias).out;
        if (kOnCpu && out.empty()) continue;
        EXPECT_EQ(out, Oracle(layer, Precision::rounded).logits(x, w, bias))
            << "hidden " << d << ", experts " << e << ", " << name(dtype);
      }
    }
  }
}

// Token t is a vector of the standard basis, so its logits are weights: 24 bits, unchanged.
TEST_P(ExactRouterGemm, AllBitsOfWeights) {
  constexpr std::int64_t kTokens = 600, kExperts = 70;
  for (const DType dtype : kTypes) {
    if (!runs_as(dtype)) continue;
    for (const std::int64_t d : {8, 264, 584}) {
      Tensor x(kTokens * d, 0.0), w, expected;
      for (std::int64_t t = 0; t < kTokens; ++t) x[t * d + t % d] = 1.0;
      const Random random(7, d);
      for (std::int64_t i = 0; i < kExperts * d; ++i) {
        const double odd = 2.0 * static_cast<double>(random.below(i, 1 << 22)) + 1.0;
        w.push_back((i % 2 == 0 ? 1 : -1) * std::ldexp((1 << 23) + odd, -24));
      }
      for (std::int64_t t = 0; t < kTokens; ++t) {
        for (std::int64_t e = 0; e < kExperts; ++e) expected.push_back(w[e * d + t % d]);
      }
      const RouterGemmDesc desc{GemmPass::forward, kTokens, d, kExperts, dtype, true, true, true};
      const Tensor out = run(desc, GetParam().name, x, w, {}, Tensor(kExperts, 0.0)).out;
      if (kOnCpu && out.empty()) continue;
      EXPECT_EQ(out, expected) << "hidden " << d << ", " << name(dtype);
    }
  }
}

// Whole and partial tiles, and parts of the tokens, along all three axes; no tokens at all.
TEST_P(ExactRouterGemm, Sizes) {
  struct Size {
    std::int64_t tokens, hidden, experts;
  };
  constexpr Size kSizes[] = {{1, 8, 1},      {0, 16, 3},     {63, 72, 7},    {64, 64, 64},
                             {65, 136, 65},  {129, 256, 72}, {257, 264, 63}, {128, 520, 128},
                             {300, 40, 129}, {40, 24, 200},  {70, 48, 256},  {33, 16, 257},
                             {130, 8, 520},  {1000, 128, 8}, {2100, 16, 60}};
  int runs = 0;
  for (const DType dtype : kTypes) {
    if (!runs_as(dtype)) continue;
    for (const Size& size : kSizes) {
      expect_exact(size.tokens, size.hidden, size.experts, dtype);
      ++runs;
    }
  }
  if (runs == 0) GTEST_SKIP() << "nothing that this kernel runs on this processor";
}

// One run, which a tool that watches every access can afford.
TEST_P(ExactRouterGemm, Quick) {
  if (kOnCpu) GTEST_SKIP() << "the sanitizers of the CPU run everything";
  expect_exact(200, 136, 72, kTypes[0]);
  expect_exact_parts(200, 136, 71, kTypes[0], true, true, true, false);
}

INSTANTIATE_TEST_SUITE_P(Kernels, ExactRouterGemm,
                         testing::ValuesIn(kernels_of(kDevice, {"router_gemm"})),
                         [](const auto& param) { return label_of(param.param.name); });

}  // namespace
}  // namespace sonicmoe::testkit
