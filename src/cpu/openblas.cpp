// OpenBLAS's serial build hands out its scratch buffers without a lock: two threads can be given
// the same one and compute wrong products (1 in 2000 with 7 threads on 2 cores). So its two calls
// lead here (cmake/private_openblas.cmake), where they take turns.
#include <mutex>

extern "C" {

void* sonicmoe_blas_memory_alloc(int position);
void sonicmoe_blas_memory_free(void* buffer);

static std::mutex buffers;

void* sonicmoe_locked_alloc(int position) {
  const std::lock_guard lock(buffers);
  return sonicmoe_blas_memory_alloc(position);
}

void sonicmoe_locked_free(void* buffer) {
  const std::lock_guard lock(buffers);
  sonicmoe_blas_memory_free(buffer);
}
}
