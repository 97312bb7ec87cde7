#pragma once

#include "cuda/sm90/kernel_file.h"
#include "cuda/sm90/launch.cuh"

/// The definitions of kernel_file.h. Only files that instantiate them include this.
namespace sonicmoe::cuda {

template <class Operation, RowSource kSource, class T>
Status KernelFile<Operation, kSource, T>::prepare(const GroupedGemmDesc& d, const Exec& exec) {
  return prepare_family<typename Operation::template Family<kSource, T>>(d, exec);
}

template <class Operation, RowSource kSource, class T>
Status KernelFile<Operation, kSource, T>::run(const GroupedGemmDesc& d, const GroupedGemmArgs& args,
                                              void* workspace, const Exec& exec) noexcept {
  return run_family<typename Operation::template Family<kSource, T>>(d, args, workspace, exec);
}

}  // namespace sonicmoe::cuda
