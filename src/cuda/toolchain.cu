// Checks once for all device files: the language, the CUDA version and the architecture.
static_assert(__cplusplus >= 202002L, "nvcc must compile C++20");
static_assert(__CUDACC_VER_MAJOR__ >= 13, "CUDA 13.0 or newer");
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "device code must be compiled for sm_90a"
#endif
