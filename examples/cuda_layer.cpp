// A layer on a GPU: the caller's stream, and forward and backward as one CUDA graph, replayed on
// new tokens. Memory is allocated once, and nothing waits for the device between the calls.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "sonicmoe/sonicmoe.h"

static void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

static void check(const sonicmoe::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::exit(1);
}

// Device memory. cudaMalloc aligns it to 256 bytes, as a workspace needs it.
struct Memory {
  explicit Memory(std::size_t bytes) : size(bytes) {
    void* pointer = nullptr;
    check(cudaMalloc(&pointer, bytes), "cudaMalloc");
    data = {pointer, cudaFree};
  }
  std::shared_ptr<void> data;
  std::size_t size;
};

using Bf16 = std::uint16_t;

static Memory bf16(std::int64_t count) {
  return Memory(static_cast<std::size_t>(count) * sizeof(Bf16));
}

static std::vector<Bf16> random_bf16(std::int64_t count, float scale, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<Bf16> values(static_cast<std::size_t>(count));
  for (Bf16& value : values) {
    const float number = normal(engine);
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    value = static_cast<Bf16>(bits >> 16);  // cut off: good enough for random numbers
  }
  return values;
}

static void upload(const Memory& memory, const std::vector<Bf16>& values, cudaStream_t stream) {
  check(cudaMemcpyAsync(memory.data.get(), values.data(), memory.size, cudaMemcpyHostToDevice,
                        stream),
        "cudaMemcpyAsync");
}

static std::vector<Bf16> download(const Memory& memory, cudaStream_t stream) {
  std::vector<Bf16> values(memory.size / sizeof(Bf16));
  check(cudaMemcpyAsync(values.data(), memory.data.get(), memory.size, cudaMemcpyDeviceToHost,
                        stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return values;
}

int main() {
  const std::int64_t T = 4096, d = 1024, n = 256, E = 32, K = 4;
  const auto plan = sonicmoe::make_plan(
      sonicmoe::LayerDesc{
          .tokens = T,
          .router = {.experts = E, .top_k = K},
          .experts = {.hidden = d, .intermediate = n, .dtype = sonicmoe::DType::bf16}},
      sonicmoe::Device{sonicmoe::DeviceType::cuda, 0});
  check(plan.status());  // without a GPU of Hopper: which kernels there are, and why none runs

  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const sonicmoe::Stream ours{stream};

  const Memory x = bf16(T * d), router_w = bf16(E * d), w1 = bf16(E * 2 * n * d),
               w2 = bf16(E * d * n);
  const Memory dout = bf16(T * d), o = bf16(T * d), dx = bf16(T * d), logits = bf16(T * E);
  const Memory drouter_w = bf16(E * d), dw1 = bf16(E * 2 * n * d), dw2 = bf16(E * d * n);
  const Memory counts(E * sizeof(std::int32_t));
  const auto saved = plan->saved_bytes();  // all that backward needs, beside x
  const Memory preact(saved.preact), routing(saved.routing), scratch(plan->workspace_bytes());
  const sonicmoe::Workspace workspace{scratch.data.get(), scratch.size};

  sonicmoe::ForwardArgs forward;
  forward.x = x.data.get(), forward.router_w = router_w.data.get();
  forward.w1 = w1.data.get(), forward.w2 = w2.data.get();
  forward.o = o.data.get(), forward.logits = logits.data.get();
  forward.counts = static_cast<std::int32_t*>(counts.data.get());
  forward.preact = preact.data.get(), forward.routing = routing.data.get();
  sonicmoe::BackwardArgs backward;
  backward.x = x.data.get(), backward.router_w = router_w.data.get();
  backward.w1 = w1.data.get(), backward.w2 = w2.data.get();
  backward.preact = preact.data.get(), backward.routing = routing.data.get();
  backward.dout = dout.data.get(), backward.dx = dx.data.get();
  backward.drouter_w = drouter_w.data.get();
  backward.dw1 = dw1.data.get(), backward.dw2 = dw2.data.get();
  const auto step = [&] {
    check(plan->forward(forward, workspace, ours));
    check(plan->backward(backward, workspace, ours));
  };

  upload(router_w, random_bf16(E * d, 0.02f, 1), stream);
  upload(w1, random_bf16(E * 2 * n * d, 0.02f, 2), stream);
  upload(w2, random_bf16(E * d * n, 0.02f, 3), stream);
  upload(dout, random_bf16(T * d, 1.0f, 4), stream);
  upload(x, random_bf16(T * d, 1.0f, 5), stream);
  step();  // queued: the host is free as soon as it returns
  const auto first = download(dx, stream);

  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  step();
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");

  // The graph routes anew: other tokens choose other experts.
  upload(x, random_bf16(T * d, 1.0f, 6), stream);
  check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
  const auto other = download(dx, stream);
  upload(x, random_bf16(T * d, 1.0f, 5), stream);
  check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
  const bool same = download(dx, stream) == first;

  const int repeats = 100;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  check(cudaEventRecord(begin, stream), "cudaEventRecord");
  for (int i = 0; i < repeats; ++i) check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
  check(cudaEventRecord(end, stream), "cudaEventRecord");
  check(cudaEventSynchronize(end), "cudaEventSynchronize");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");

  std::printf("dx of the graph: %s\n", same ? "the same bits as without it" : "OTHER BITS");
  std::printf("dx of other tokens: %s\n", other == first ? "THE SAME" : "another");
  std::printf("forward and backward: %.3f ms, kept between them: %.1f MiB\n",
              static_cast<double>(ms) / repeats, static_cast<double>(saved.total()) / (1 << 20));
  return same && other != first ? 0 : 1;
}
