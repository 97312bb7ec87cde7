#pragma once

#include "core/kernel.h"
#include "cuda/sm90/layouts.h"
#include "cuda/storage.cuh"

/// Some operations have too many kernels for one device file. OPERATION.cu has their entries of the
/// kernel list, and other files have their kernels. These are named by what they share, among it
/// the tile, transposed weights, the source of rows and the storage type.
namespace sonicmoe::cuda {

/// What such a file compiles, for a family as prepare_family() takes it (launch.cuh).
/// kernel_file.cuh has the definitions, the file instantiates them.
template <class Family, class Desc = GroupedGemmDesc>
struct KernelFile {
  static Status prepare(const Desc& d, const Exec& exec);
  static Status run(const Desc& d, const typename Desc::Args& args, void* workspace,
                    const Exec& exec) noexcept;
};

/// Calls f(KernelFile{}) with the file that has a descriptor's kernels, for an operation with
/// activations and its Family<kSource, T, kTransposed>.
template <template <RowSource, class, bool> class Family, class F>
Status visit_file(const GroupedGemmDesc& d, F&& f) {
  return visit_storage(d.dtype, [&](auto type) {
    using T = decltype(type);
    return visit_transposed(d, [&](auto transposed) {
      constexpr bool kTransposed = decltype(transposed)::value;
      switch (d.row_source) {
        case RowSource::gathered:
          return f(KernelFile<Family<RowSource::gathered, T, kTransposed>>{});
        case RowSource::contiguous:
          break;
      }
      return f(KernelFile<Family<RowSource::contiguous, T, kTransposed>>{});
    });
  });
}

/// Completes an entry of the kernel list whose kernels are compiled in files of their own.
/// `Operation::visit(d, f)` calls f(KernelFile{}).
template <class Operation, class Desc = GroupedGemmDesc>
constexpr Kernel<Desc> file_entry(Kernel<Desc> kernel) {
  kernel.arch = 90;
  kernel.dtypes = kStorageTypes;
  kernel.prepare = [](const Desc& d, const Exec& exec) {
    return Operation::visit(d, [&](auto file) { return file.prepare(d, exec); });
  };
  kernel.run = [](const Desc& d, const typename Desc::Args& args, void* workspace,
                  const Exec& exec) noexcept {
    return Operation::visit(d, [&](auto file) { return file.run(d, args, workspace, exec); });
  };
  return kernel;
}

}  // namespace sonicmoe::cuda
