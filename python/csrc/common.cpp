#include "common.h"

#include <dlfcn.h>

#include <stdexcept>

namespace sonicmoe::python {
namespace {

constexpr std::size_t kAlignment = 256;               // of Workspace::data
constexpr std::size_t kLarge = std::size_t{4} << 20;  // smaller pieces are for malloc to keep

std::string text(const std::int64_t* values, std::size_t count) {
  std::string result = "(";
  for (std::size_t i = 0; i < count; ++i) {
    result += (i > 0 ? ", " : "") + std::to_string(values[i]);
  }
  return result + (count == 1 ? ",)" : ")");
}

const char* text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

std::string text(Device device) {
  if (device.type == DeviceType::cpu) return "cpu";
  return std::string("cuda:").append(std::to_string(device.index));
}

// std::invalid_argument becomes ValueError in Python, std::runtime_error RuntimeError.
[[noreturn]] void refuse(const char* argument, const std::string& got, const std::string& allowed) {
  throw std::invalid_argument(std::string(argument) + ": got " + got + ", allowed: " + allowed);
}

/// Only CUDA reads 16 bytes at a time.
bool is_aligned(const Tensor& tensor) {
  return tensor.is_cpu() || reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

/// The workspace of the last CPU call that has ended.
class KeptMemory {
 public:
  /// What is kept, if it has `bytes` and is not too large for them. If not it is freed: it would
  /// only stand beside what the caller takes instead.
  HostMemory take(std::size_t bytes) {
    HostMemory memory;
    {
      const std::lock_guard lock(mutex_);
      memory = std::exchange(memory_, {});
    }
    const bool fits = memory.bytes >= bytes && memory.bytes / Scratch::kKeptPerNeeded <= bytes;
    return fits ? std::move(memory) : HostMemory{};
  }
  void put(HostMemory memory) {
    const std::lock_guard lock(mutex_);
    std::swap(memory_, memory);  // the other one is freed after the lock
  }

 private:
  std::mutex mutex_;
  HostMemory memory_;
};

KeptMemory& kept_memory() {
  static KeptMemory memory;
  return memory;
}

HostMemory new_memory(std::size_t bytes) {
  HostMemory memory;
  memory.bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  memory.data.reset(std::aligned_alloc(kAlignment, memory.bytes));
  if (memory.data == nullptr) {
    check(Status::error(StatusCode::out_of_memory, "workspace: got no memory for %zu bytes",
                        memory.bytes));
  }
  return memory;
}

}  // namespace

void check(const Status& status) {
  switch (status.code()) {
    case StatusCode::ok:
      return;
    case StatusCode::invalid_argument:
    case StatusCode::unsupported:
    case StatusCode::invalid_data:
      throw std::invalid_argument(status.message());
    case StatusCode::device_error:
    case StatusCode::out_of_memory:
      break;
  }
  throw std::runtime_error(status.message());
}

void check_tensor(const char* argument, const Tensor& tensor, const Tensor& like, ScalarType dtype,
                  Shape shape, const char* meaning) {
  if (const Device device = device_of(tensor), allowed = device_of(like); device != allowed) {
    refuse(argument, std::string("a tensor on ").append(text(device)), text(allowed));
  }
  const auto sizes = tensor.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    refuse(argument, "shape " + text(sizes.data(), sizes.size()),
           std::string(meaning) + " = " + text(shape.begin(), shape.size()));
  }
  if (tensor.scalar_type() != dtype) refuse(argument, text(tensor.scalar_type()), text(dtype));
  if (!tensor.is_contiguous()) {
    const auto strides = tensor.strides();
    refuse(argument, "strides " + text(strides.data(), strides.size()),
           std::string("a contiguous ") + meaning);
  }
}

void check_router_tensor(const char* argument, const OptionalTensor& tensor, bool option,
                         const Tensor& like, std::int64_t experts) {
  if (tensor.has_value() != option) {
    refuse(argument, tensor ? "a tensor" : "None",
           std::string(option ? "a tensor" : "None") + ", for " + argument + " is " +
               (option ? "true" : "false") + " in `layer`");
  }
  if (tensor) check_tensor(argument, *tensor, like, ScalarType::Float, {experts}, "(E)");
}

void check_draws(const Tensor& draws, const Tensor& like) {
  check_tensor("draws", draws, like, ScalarType::Long, {2}, "(seed, offset)");
}

void check_alignment(const char* argument, const Tensor& tensor) {
  if (is_aligned(tensor)) return;
  check(Status::error(StatusCode::invalid_argument,
                      "%s: got address %p, as a view into a flat buffer may have, allowed: "
                      "multiples of 16 bytes",
                      argument, tensor.const_data_ptr()));
}

Tensor aligned(const Tensor& tensor) {
  return is_aligned(tensor) ? tensor : torch::stable::clone(tensor);
}

OptionalTensor aligned(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(aligned(*tensor)) : tensor;
}

void check_dims(const char* argument, const Tensor& tensor, std::int64_t dims,
                const char* meaning) {
  if (tensor.dim() == dims) return;
  const auto sizes = tensor.sizes();
  refuse(argument, "shape " + text(sizes.data(), sizes.size()), meaning);
}

DType dtype_of(const char* argument, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      refuse(argument, text(tensor.scalar_type()), "float32, bfloat16, float16");
  }
}

LayerDesc options_of(const std::string& layer) {
  static std::mutex mutex;
  static std::vector<std::pair<std::string, LayerDesc>> recent;
  constexpr std::size_t kCapacity = 32;  // a model has a few distinct layers
  {
    const std::lock_guard lock(mutex);
    for (const auto& [text, options] : recent) {
      if (text == layer) return options;
    }
  }
  const Result<LayerDesc> options = parse_layer(layer);
  check(options.status());
  if (!options.value().router.projects()) {
    refuse("router_input", name(options.value().router.input),
           "projection (other inputs have operators)");
  }
  // What the tensors and the other arguments say, whatever value the text has for it.
  for (const char* key : {"tokens", "hidden", "intermediate", "experts", "dtype", "list_length",
                          "bias", "f32_weight_grads", "accumulate_weight_grads",
                          "dpreact_in_workspace", "row_source", "index_type", "f32_router_w"}) {
    if ((" " + layer).find(std::string(" ") + key + "=") != std::string::npos) {
      refuse("layer", key, "options, for the other arguments say that");
    }
  }
  const std::lock_guard lock(mutex);
  if (recent.size() == kCapacity) recent.erase(recent.begin());
  recent.emplace_back(layer, options.value());
  return options.value();
}

Device device_of(const Tensor& tensor) {
  if (!tensor.is_cuda()) return {};
  return {DeviceType::cuda, tensor.get_device_index()};
}

Stream stream_of(const Tensor& tensor) {
  if (!tensor.is_cuda()) return {};
  // Looked up, so that the extension also loads into a torch without CUDA.
  using CurrentStream = AOTITorchError(std::int32_t device_index, void** stream);
  static auto* const current = [] {
    void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch_cuda == nullptr ? nullptr
                                 : reinterpret_cast<CurrentStream*>(
                                       dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (current == nullptr || current(tensor.get_device_index(), &stream) != 0) {
    throw std::runtime_error("torch has no current CUDA stream");
  }
  return {stream};
}

Tensor empty(const Tensor& like, Shape shape, ScalarType dtype) {
  constexpr std::size_t kMaxDims = 3;
  std::array<std::int64_t, kMaxDims> strides{};
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides.at(i) = stride;
    stride *= std::max<std::int64_t>(shape.begin()[i], 1);
  }
  // torch::stable::empty() looks an operator up by its name, which takes longer than to make the
  // tensor. A call makes up to ten.
  std::int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle tensor = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<std::int64_t>(shape.size()), shape.begin(), strides.data(),
      torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(dtype)), device,
      like.get_device_index(), &tensor));
  return Tensor(tensor);
}

Scratch::Scratch(const Tensor& like, std::size_t bytes) : data_(nullptr), bytes_(bytes) {
  if (bytes == 0) return;
  if (!like.is_cpu()) {
    tensor_ = empty(like, {static_cast<std::int64_t>(bytes + kAlignment)}, ScalarType::Byte);
    const auto address = reinterpret_cast<std::uintptr_t>(tensor_->mutable_data_ptr());
    data_ = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
    return;
  }
  if (bytes >= kLarge) memory_ = kept_memory().take(bytes);
  if (memory_.data == nullptr) memory_ = new_memory(bytes);
  data_ = memory_.data.get();
}

Scratch::~Scratch() {
  if (memory_.bytes >= kLarge) kept_memory().put(std::move(memory_));
}

RouterPlan router_of(const LayerDesc& desc, const Tensor& x) {
  static PlanCache<RoutingDesc, RouterPlan> routers;
  return routers.get(desc.routing(), x);
}

std::int64_t routing_ints(const RouterPlan& router) {
  return static_cast<std::int64_t>(router.routing_bytes() / sizeof(std::int32_t));
}

RoutedRows rows_of(const RouterPlan& router, const Tensor& routing) {
  // routed_rows() takes void*, but nobody writes what this returns.
  return router.routed_rows(const_cast<std::int32_t*>(input<std::int32_t>(routing)));
}

}  // namespace sonicmoe::python
