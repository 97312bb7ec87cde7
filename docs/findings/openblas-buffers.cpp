// Whether threads that call sgemm at the same time get wrong products (openblas-buffers.md). On
// Debian 12 with libopenblas-serial-dev:
//
// g++ -O2 -fopenmp -I/usr/include/x86_64-linux-gnu/openblas-serial openblas-buffers.cpp
//     /usr/lib/x86_64-linux-gnu/openblas-serial/libopenblas.a && ./a.out

#include <cblas.h>
#include <omp.h>

#include <cstdio>
#include <vector>

int main() {
  constexpr int m = 20, n = 72, k = 40;  // just past OpenBLAS's path for small products
  long wrong = 0;
#pragma omp parallel num_threads(4) reduction(+ : wrong)
  {
    const float value = 1.0f + omp_get_thread_num();
    const std::vector<float> a(m * k, value), b(n * k, 1.0f);
    std::vector<float> c(m * n);
    for (int run = 0; run < 100000; ++run) {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1.0f, a.data(), k, b.data(), k,
                  0.0f, c.data(), n);
      wrong += c != std::vector<float>(m * n, k * value);
    }
  }
  std::printf("%ld of 400000 products wrong\n", wrong);
}
