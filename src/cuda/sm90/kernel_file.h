#pragma once

#include "core/kernel.h"
#include "cuda/storage.cuh"

/// The operations with activations have too many kernels for one device file. OPERATION.cu has
/// their entries of the kernel list, OPERATION_SOURCE_TYPE.cu the kernels of one source of rows and
/// one storage type.
namespace sonicmoe::cuda {

/// What such a file compiles: kernel_file.cuh has the definitions, the file instantiates them.
/// `Operation::Family<kSource, T>` is a family as prepare_family() takes it (launch.cuh).
template <class Operation, RowSource kSource, class T>
struct KernelFile {
  static Status prepare(const GroupedGemmDesc& d, const Exec& exec);
  static Status run(const GroupedGemmDesc& d, const GroupedGemmArgs& args, void* workspace,
                    const Exec& exec) noexcept;
};

/// Calls f(KernelFile{}) with the file that has a descriptor's kernels.
template <class Operation, class F>
Status visit_file(const GroupedGemmDesc& d, F&& f) {
  return visit_storage(d.dtype, [&](auto type) {
    using T = decltype(type);
    switch (d.row_source) {
      case RowSource::gathered:
        return f(KernelFile<Operation, RowSource::gathered, T>{});
      case RowSource::contiguous:
        break;
    }
    return f(KernelFile<Operation, RowSource::contiguous, T>{});
  });
}

/// Completes an entry of the kernel list whose kernels are compiled in files of their own.
template <class Operation>
constexpr Kernel<GroupedGemmDesc> file_entry(Kernel<GroupedGemmDesc> kernel) {
  kernel.arch = 90;
  kernel.dtypes = kStorageTypes;
  kernel.prepare = [](const GroupedGemmDesc& d, const Exec& exec) {
    return visit_file<Operation>(d, [&](auto file) { return file.prepare(d, exec); });
  };
  kernel.run = [](const GroupedGemmDesc& d, const GroupedGemmArgs& args, void* workspace,
                  const Exec& exec) noexcept {
    return visit_file<Operation>(d, [&](auto file) { return file.run(d, args, workspace, exec); });
  };
  return kernel;
}

}  // namespace sonicmoe::cuda
