#pragma once

#include "cuda/sm90/kernel_file.h"
#include "cuda/sm90/launch.cuh"

/// The definitions of kernel_file.h. Only files that instantiate them include this.
namespace sonicmoe::cuda {

template <class Family, class Desc>
Status KernelFile<Family, Desc>::prepare(const Desc& d, const Exec& exec) {
  return prepare_family<Family>(d, exec);
}

template <class Family, class Desc>
Status KernelFile<Family, Desc>::run(const Desc& d, const typename Desc::Args& args,
                                     void* workspace, const Exec& exec) noexcept {
  return run_family<Family>(d, args, workspace, exec);
}

}  // namespace sonicmoe::cuda
