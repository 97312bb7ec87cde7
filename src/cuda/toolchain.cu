// Checks once for all device files: the language and the CUDA version.
static_assert(__cplusplus >= 202002L, "nvcc must compile C++20");
static_assert(__CUDACC_VER_MAJOR__ >= 13, "CUDA 13.0 or newer");
