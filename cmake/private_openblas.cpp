// Becomes part of our copy of OpenBLAS (private_openblas.cmake) and mends three things in it.
#include <mutex>

extern "C" {

// 1. Nobody outside sees it: a symbol takes the strictest visibility of all that mention it.
asm(".hidden cblas_sgemm");

// 2. The serial build hands out its scratch buffers without a lock: two threads can be given the
// same one and compute wrong products (1 in 2000 with 7 threads on 2 cores). So they take turns.
static std::mutex buffers;

void* __real_blas_memory_alloc(int position);
void __real_blas_memory_free(void* buffer);

void* __wrap_blas_memory_alloc(int position) {
  const std::lock_guard lock(buffers);
  return __real_blas_memory_alloc(position);
}

void __wrap_blas_memory_free(void* buffer) {
  const std::lock_guard lock(buffers);
  __real_blas_memory_free(buffer);
}

// 3. The AVX-512 kernels for small matrices pack into memory from malloc, and our operations do not
// allocate. These two answer whether such a kernel may be used.
int sgemm_small_matrix_permit_SKYLAKEX(int, int, long, long, long, float, float) { return 0; }
int sgemm_small_matrix_permit_COOPERLAKE(int, int, long, long, long, float, float) { return 0; }
}
