// The one file of verify that knows CUDA.
#include "testkit/device_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#if SONICMOE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace sonicmoe::testkit {
namespace {

[[noreturn, maybe_unused]] void fail(const char* what, const char* why) {
  throw std::runtime_error(std::string(what) + ": " + why);
}

bool on_host(Device device) {
#if !SONICMOE_HAS_CUDA
  if (device.type == DeviceType::cuda) fail("device", "this build has no CUDA");
#endif
  return device.type == DeviceType::cpu;
}

#if SONICMOE_HAS_CUDA
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(what, cudaGetErrorString(error));
}

void enter(Device device) { check(cudaSetDevice(device.index), "cudaSetDevice"); }

/// A call must not take memory from the device, nor call the host.
bool only_work(cudaGraph_t graph) {
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  return std::ranges::all_of(nodes, [](cudaGraphNode_t node) {
    cudaGraphNodeType type{};
    check(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    return type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemcpy ||
           type == cudaGraphNodeTypeMemset;
  });
}

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
#endif

}  // namespace

void* allocate(Device device, std::size_t bytes) {
  void* memory = nullptr;
  if (on_host(device)) {
    memory = std::malloc(bytes);
    if (memory == nullptr && bytes > 0) throw std::bad_alloc();
  }
#if SONICMOE_HAS_CUDA
  else {
    enter(device);
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
  }
#endif
  return memory;
}

void release(Device device, void* memory) noexcept {
  if (device.type == DeviceType::cpu) std::free(memory);
#if SONICMOE_HAS_CUDA
  if (device.type == DeviceType::cuda) (void)cudaFree(memory);
#endif
}

void copy(Device device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (on_host(device)) std::memcpy(to, from, bytes);
#if SONICMOE_HAS_CUDA
  if (device.type == DeviceType::cuda) {
    enter(device);
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
    check(cudaDeviceSynchronize(), "cudaMemcpy");
  }
#endif
}

void zero(Device device, void* memory, std::size_t bytes) {
  if (bytes == 0) return;
  if (on_host(device)) std::memset(memory, 0, bytes);
#if SONICMOE_HAS_CUDA
  if (device.type == DeviceType::cuda) {
    enter(device);
    check(cudaMemset(memory, 0, bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
  }
#endif
}

std::size_t free_bytes(Device device) {
  std::size_t left = 0;
#if SONICMOE_HAS_CUDA
  if (device.type == DeviceType::cuda) {
    std::size_t total = 0;
    enter(device);
    check(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
  }
#endif
  (void)on_host(device);
  return left;
}

Status synchronize([[maybe_unused]] Device device) noexcept {
#if SONICMOE_HAS_CUDA
  if (device.type == DeviceType::cuda) {
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return Status::device(error, cudaGetErrorString(error));
  }
#endif
  return {};
}

OwnStream::OwnStream(Device device) : device_(device) {
#if SONICMOE_HAS_CUDA
  if (on_host(device)) return;
  enter(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  handle_ = stream;
#endif
}

OwnStream::~OwnStream() {
#if SONICMOE_HAS_CUDA
  if (handle_ != nullptr) (void)cudaStreamDestroy(native(*this));
#endif
}

#if SONICMOE_HAS_CUDA
void Graph::begin(Device device, Stream stream) {
  enter(device);
  check(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeGlobal), "begin capture");
}

Graph::Graph(Device device, Stream stream) : device_(device) {
  cudaGraph_t recorded = nullptr;
  check(cudaStreamEndCapture(native(stream), &recorded), "end capture");
  if (!only_work(recorded)) {
    (void)cudaGraphDestroy(recorded);
    fail("graph", "something was recorded that is no kernel, copy or memset");
  }
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, recorded, 0);
  (void)cudaGraphDestroy(recorded);
  check(error, "cudaGraphInstantiate");
  graph_ = executable;
}

Graph::~Graph() { (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph_)); }

void Graph::launch(Stream stream) const {
  enter(device_);
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph_), native(stream)), "cudaGraphLaunch");
}
#else
void Graph::begin(Device, Stream) { fail("graph", "this build has no CUDA"); }
Graph::Graph(Device device, Stream) : device_(device) { fail("graph", "this build has no CUDA"); }
Graph::~Graph() = default;
void Graph::launch(Stream) const {}
#endif

}  // namespace sonicmoe::testkit
