#pragma once

#include "cuda/sm80/launch.cuh"

/// The definitions of Compiled. Only files that instantiate them include this.
namespace sonicmoe::cuda::sm80 {

template <class Config>
Status Compiled<Config>::prepare() {
  return allow_shared_memory(grouped_gemm<Config>, Config::kBytes);
}

template <class Config>
Status Compiled<Config>::launch(const Params<Config>& params, std::int64_t tiles, const Exec& exec,
                                const char* what) {
  if (tiles == 0) return {};
  if (tiles > INT32_MAX) {
    return Status::error(StatusCode::unsupported, "tiles: got %lld, allowed: at most %d",
                         static_cast<long long>(tiles), INT32_MAX);
  }
  grouped_gemm<Config>
      <<<static_cast<unsigned>(tiles), Config::kThreads, Config::kBytes, stream_of(exec)>>>(params);
  return launched(what);
}

}  // namespace sonicmoe::cuda::sm80
