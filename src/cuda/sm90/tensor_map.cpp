#include "cuda/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>

namespace sonicmoe::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, looked up at run time: nothing links to the driver, so that programs
/// start without one.
Encode encoder() noexcept {
  static const Encode kEncode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return Encode{nullptr};
    return reinterpret_cast<Encode>(function);
  }();
  return kEncode;
}

/// A thread's first call of CUDA finds no current context, and the driver, unlike the runtime,
/// makes none. PyTorch runs backward in such a thread.
bool make_context_current() noexcept {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
}

}  // namespace

CUtensorMap TensorMaps::encode(const TensorView& v) noexcept {
  CUtensorMap map{};
  if (!status_.ok()) return map;
  const Encode encode_tiled = encoder();
  if (encode_tiled == nullptr) {
    status_ =
        Status::error(StatusCode::unsupported,
                      "driver: got one without cuTensorMapEncodeTiled, allowed: CUDA 12.0 on");
    return map;
  }
  // The driver refuses extents of 0. The kernels never read such a tensor, but experts without rows
  // still get zeros as weight gradients.
  const auto extent = [](std::int64_t x) {
    return static_cast<cuuint64_t>(std::max<std::int64_t>(x, 1));
  };
  const auto stride = [](std::int64_t x) {
    return static_cast<cuuint64_t>(std::max<std::int64_t>(x, 8) * 2);
  };
  const cuuint32_t rows = static_cast<cuuint32_t>(v.box);
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const cuuint64_t extents[3] = {extent(v.inner), extent(v.outer), extent(v.experts)};
  const cuuint64_t strides[2] = {stride(v.outer_stride), stride(v.expert_stride)};
  const cuuint32_t box[3] = {64, rows, 1};
  // Row 8 g + 4 b + q is (b, q, g), and b runs fastest.
  const cuuint64_t paired_extents[5] = {extent(v.inner), 2, 4, extent(v.outer / 8),
                                        extent(v.experts)};
  const cuuint64_t paired_strides[4] = {4 * strides[0], strides[0], 8 * strides[0], strides[1]};
  const cuuint32_t paired_box[5] = {64, 2, 4, rows / 8, 1};
  CUtensorMapDataType type{};
  switch (dtype_) {
    case DType::bf16:
      type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
      break;
    case DType::f16:
      type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
      break;
    case DType::f32:
      status_ = Status::error(StatusCode::unsupported, "dtype: got f32, allowed: bf16, f16");
      return map;
  }
  const auto encode_once = [&] {
    return encode_tiled(&map, type, v.pairs_rows ? 5 : 3, const_cast<void*>(v.base),
                        v.pairs_rows ? paired_extents : extents,
                        v.pairs_rows ? paired_strides : strides, v.pairs_rows ? paired_box : box,
                        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode_once();
  if (result == CUDA_ERROR_INVALID_CONTEXT && make_context_current()) result = encode_once();
  if (result != CUDA_SUCCESS) status_ = Status::device(static_cast<int>(result), "tensor map");
  return map;
}

}  // namespace sonicmoe::cuda
