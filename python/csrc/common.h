#pragma once

#include <sonicmoe/sonicmoe.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// What the operators share: checks that turn into Python exceptions, allocation, plans.
namespace sonicmoe::python {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::initializer_list<std::int64_t>;

/// Turns a failure into an exception: ValueError for input that is not allowed, else RuntimeError.
void check(const Status& status);

/// Throws ValueError unless the tensor is contiguous, where `like` is, and has this shape and
/// dtype. `meaning` is the shape in words, "(E, 2n, d)".
void check_tensor(const char* argument, const Tensor& tensor, const Tensor& like, ScalarType dtype,
                  Shape shape, const char* meaning);

/// Throws ValueError unless the tensor (E) float32 of the router is there just when `layer` has the
/// option of its name.
void check_router_tensor(const char* argument, const OptionalTensor& tensor, bool option,
                         const Tensor& like, std::int64_t experts);

/// Throws ValueError unless the tensor is seed and offset (2) int64 of token rounding's draws.
void check_draws(const Tensor& draws, const Tensor& like);

/// Throws ValueError unless the tensor starts at a multiple of 16 bytes, as the library wants it on
/// CUDA. It checks that too, but under its own names and not before it needs the tensor.
void check_alignment(const char* argument, const Tensor& tensor);

/// A contiguous tensor, or on CUDA a copy of it if it does not start at a multiple of 16 bytes: a
/// part of another one may start anywhere, as the gradient of torch.cat or a parameter in a flat
/// buffer. For tensors that are small beside the experts' weights.
Tensor aligned(const Tensor& tensor);
OptionalTensor aligned(const OptionalTensor& tensor);
/// The same in place.
template <class... Tensors>
void align(Tensors*... tensors) {
  ((*tensors = aligned(*tensors)), ...);
}

/// Throws ValueError unless the tensor has this many dimensions.
void check_dims(const char* argument, const Tensor& tensor, std::int64_t dims, const char* meaning);

/// The library's name of a tensor's dtype; throws ValueError if it has none.
DType dtype_of(const char* argument, const Tensor& tensor);

/// The options that an operator's `layer` gives in the text form of a description (layer.h). Sizes,
/// dtypes, biases and the source of rows follow from its tensors: a text that gives one of those is
/// refused. So is a `router_input`, which the operator's name says. Biases and scales of the router
/// are in the text and among the tensors. Texts of recent calls are read once.
LayerDesc options_of(const std::string& layer);

/// Where a tensor is, and the stream that torch is using there.
Device device_of(const Tensor& tensor);
Stream stream_of(const Tensor& tensor);

/// An uninitialised tensor of at most three dimensions on the device of `like`.
Tensor empty(const Tensor& like, Shape shape, ScalarType dtype);

/// Where to read a tensor; null if there is none.
template <class T>
const T* input(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
const T* input(const OptionalTensor& tensor) {
  return tensor ? input<T>(*tensor) : nullptr;
}
/// Seed and offset of token rounding's draws, in device memory; null: 0 and 0.
inline const std::uint64_t* draws_of(const OptionalTensor& draws) {
  return reinterpret_cast<const std::uint64_t*>(input<std::int64_t>(draws));
}
/// Where to write a tensor.
template <class T>
T* output(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}
template <class T>
T* output(const OptionalTensor& tensor) {
  return tensor ? output<T>(*tensor) : nullptr;
}

/// Memory of the host, freed with its owner.
struct HostMemory {
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data;
  std::size_t bytes = 0;
};

/// Workspace for one call. On the CPU a large one is kept when the call ends, for the next call
/// that it fits: zeroed pages of memory mapped afresh took a seventh of a step
/// (docs/findings/archive/cpu-memory.md). One at most is kept; the next large call frees it if that
/// needs more, or less than 1 / kKeptPerNeeded of it. Calls that overlap take memory of their own.
/// Elsewhere workspace comes from torch's allocator, which keeps memory itself.
class Scratch {
 public:
  static constexpr std::size_t kKeptPerNeeded = 4;

  Scratch(const Tensor& like, std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator Workspace() const { return {data_, bytes_}; }  // NOLINT: implicit by design

 private:
  std::optional<Tensor> tensor_;
  HostMemory memory_;
  void* data_;
  std::size_t bytes_;
};

/// An error word that nobody reads. With it no call on the CPU refuses bad logits: as on CUDA, the
/// output of their token is NaN.
class Unread {
 public:
  explicit Unread(const Tensor& like) : wanted_(like.is_cpu()) {}
  std::int32_t* word() { return wanted_ ? &word_ : nullptr; }

 private:
  bool wanted_;
  std::int32_t word_ = 0;
};

/// Plans of recent calls, so that a training loop makes each of them once, on every device. Plans
/// are immutable: the lock covers the look-up only.
template <class Desc, class Plan = OpPlan<Desc>>
class PlanCache {
 public:
  /// A plan for the device of `like`.
  Plan get(const Desc& desc, const Tensor& like) {
    const Device device = device_of(like);
    const int threads = static_cast<int>(torch::stable::get_num_threads());
    {
      const std::lock_guard lock(mutex_);
      for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
        if (entry->device != device || entry->threads != threads) continue;
        if (entry->plan.desc() != desc) continue;
        std::rotate(entries_.begin(), entry, entry + 1);
        return entries_.front().plan;
      }
    }
    Options options;
    options.threads = threads;
    Result<Plan> plan = make_plan(desc, device, options);
    check(plan.status());
    const std::lock_guard lock(mutex_);
    if (entries_.size() == kCapacity) entries_.pop_back();
    entries_.insert(entries_.begin(), Entry{device, threads, plan.value()});
    return std::move(plan).value();
  }

 private:
  static constexpr std::size_t kCapacity = 32;  // a model has a few distinct layers
  struct Entry {
    Device device;
    int threads;
    Plan plan;
  };
  std::mutex mutex_;
  std::vector<Entry> entries_;  // most recent first
};

/// The router of ids and weights in a layer, whose sizes are set.
RouterPlan router_of(const LayerDesc& desc, const Tensor& x);
/// Its block is an array of int32, so that torch sees a plain tensor.
std::int64_t routing_ints(const RouterPlan& router);
/// The arrays in a block, to be read.
RoutedRows rows_of(const RouterPlan& router, const Tensor& routing);

}  // namespace sonicmoe::python
