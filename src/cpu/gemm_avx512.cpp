#include <type_traits>

#include "cpu/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Packed blocks are made of 32-bit words along k. A word is one float, or the bf16 values of two
// consecutive k, low half first. An odd k ends with a zero half.
//
//     A, tn:      word[k][m], rows of kLhsColumns words
//     A, nt, nn:  not packed; tile() broadcasts words straight from the (gathered) rows
//     B:          panels of 64 columns: word[panel][k][64], zero in columns past n
#define SONICMOE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace sonicmoe::cpu {
namespace {

using math::Bf16;

constexpr int kRowsOfTile = 6;     // registers: 6 x 4 of sums + 4 of B's panel + 1 of A, of 32
constexpr int kPanelColumns = 64;  // 4 registers of 16 floats
/// Elements in a word, and words that hold k elements.
template <class T>
constexpr std::int64_t kPerWord = 4 / sizeof(T);
template <class T>
std::int64_t words_of(std::int64_t k) {
  return (k + kPerWord<T> - 1) / kPerWord<T>;
}
template <class T>
constexpr std::int64_t kMaxWords = kBlockK / kPerWord<T>;
constexpr std::int64_t kLhsColumns = (kBlockN + kRowsOfTile - 1) / kRowsOfTile * kRowsOfTile;
template <class T>
constexpr std::int64_t kLhsWords = kLhsColumns* kMaxWords<T>;
template <class T>
constexpr std::int64_t kRhsWords = kBlockN* kMaxWords<T>;

/// Stores words (a[j], b[j]) for j < 32. The registers a and b hold two rows of bf16.
SONICMOE_AVX512 inline void interleave(__m512i a, __m512i b, std::uint32_t* out) {
  // Even halves of the words come from a, odd halves from b.
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
  _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(a, high, b));
}

/// Loads 16 words of a row: `count` elements at most, then zeros. It reads nothing past `count`.
SONICMOE_AVX512 inline __m512i load_words(const Bf16* row, std::int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(row);
  const __mmask32 mask = count <= 0 ? 0 : (__mmask32{1} << count) - 1;
  return _mm512_maskz_loadu_epi16(mask, row);
}
SONICMOE_AVX512 inline __m512i load_words(const float* row, std::int64_t count) {
  if (count >= 16) return _mm512_loadu_si512(row);
  const __mmask16 mask = count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
  return _mm512_maskz_loadu_epi32(mask, row);
}

/// Packs `width` columns of k rows, from `column` on, into words[k][stride]. It stores `padded`
/// columns, a multiple of 32, with zeros past `width`.
SONICMOE_AVX512 void pack_k_rows(Rows<float> rows, std::int64_t k, std::int64_t column,
                                 std::int64_t width, std::int64_t padded, std::uint32_t* words,
                                 std::int64_t stride) {
  for (std::int64_t i = 0; i < k; ++i) {
    const float* row = rows.row(i) + column;
    for (std::int64_t j = 0; j < padded; j += 16) {
      _mm512_storeu_si512(words + i * stride + j, load_words(row + j, width - j));
    }
  }
}
SONICMOE_AVX512 void pack_k_rows(Rows<Bf16> rows, std::int64_t k, std::int64_t column,
                                 std::int64_t width, std::int64_t padded, std::uint32_t* words,
                                 std::int64_t stride) {
  for (std::int64_t pair = 0; pair < words_of<Bf16>(k); ++pair) {
    const Bf16* even = rows.row(2 * pair) + column;
    const bool whole = 2 * pair + 1 < k;
    const Bf16* odd = whole ? rows.row(2 * pair + 1) + column : even;
    std::uint32_t* out = words + pair * stride;
    for (std::int64_t j = 0; j < padded; j += 32) {
      const __m512i a = load_words(even + j, width - j);
      const __m512i b = whole ? load_words(odd + j, width - j) : _mm512_setzero_si512();
      interleave(a, b, out + j);
    }
  }
}

/// Transposes 16 x 16 words: row i of the result holds word i of each input row.
SONICMOE_AVX512 inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

/// Packs `count` rows of k elements, from row `first` on, into the columns of one panel
/// words[k][64]. Columns past `count` are zero.
template <class T>
SONICMOE_AVX512 void pack_n_rows(Rows<T> rows, std::int64_t first, std::int64_t count,
                                 std::int64_t k, std::uint32_t* panel) {
  const std::int64_t words = words_of<T>(k);
  for (std::int64_t j = 0; j < kPanelColumns; j += 16) {
    for (std::int64_t word = 0; word < words; word += 16) {
      const std::int64_t k0 = word * kPerWord<T>;
      __m512i r[16];
      for (int i = 0; i < 16; ++i) {
        r[i] = j + i < count ? load_words(rows.row(first + j + i) + k0, k - k0)
                             : _mm512_setzero_si512();
      }
      transpose16(r);
      const std::int64_t valid = std::min<std::int64_t>(16, words - word);
      for (std::int64_t i = 0; i < valid; ++i) {
        _mm512_storeu_si512(panel + (word + i) * kPanelColumns + j, r[i]);
      }
    }
  }
}

/// sum += a word of A (in all lanes of `left`) times 16 words of B's panel.
SONICMOE_AVX512 inline __m512 multiply_add(float, __m512i left, __m512i right, __m512 sum) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sum);
}
SONICMOE_AVX512 inline __m512 multiply_add(Bf16, __m512i left, __m512i right, __m512 sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
}

/// Computes one tile of C: `rows` (at most 6) x `columns`. At most 64 columns are stored. left[i]
/// is the address of A's row i, and `step` is the distance of its words in bytes.
template <class T>
SONICMOE_AVX512 void tile(const char* const (&left)[kRowsOfTile], std::int64_t step,
                          const std::uint32_t* panel, std::int64_t words, int rows,
                          std::int64_t columns, float* c, std::int64_t ldc, bool accumulate) {
  __m512 sum[kRowsOfTile][4];
  __mmask16 mask[4];
  for (int j = 0; j < 4; ++j) {
    const std::int64_t left_over = columns - 16 * j;
    mask[j] = left_over >= 16  ? __mmask16{0xffff}
              : left_over <= 0 ? __mmask16{0}
                               : static_cast<__mmask16>((1u << left_over) - 1);
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRowsOfTile; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      sum[i][j] = accumulate && i < rows ? _mm512_maskz_loadu_ps(mask[j], c + i * ldc + 16 * j)
                                         : _mm512_setzero_ps();
    }
  }
  const char *l0 = left[0], *l1 = left[1], *l2 = left[2], *l3 = left[3], *l4 = left[4],
             *l5 = left[5];
  for (std::int64_t word = 0; word < words; ++word) {
    __m512i b[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      b[j] = _mm512_loadu_si512(panel + 16 * j);
    }
    panel += kPanelColumns;
    const auto accumulate_row = [&](const char*& l, __m512(&row)[4]) SONICMOE_AVX512
        __attribute__((always_inline)) {
      int bits;
      __builtin_memcpy(&bits, l, 4);
      const __m512i a = _mm512_set1_epi32(bits);
      l += step;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) row[j] = multiply_add(T{}, a, b[j], row[j]);
    };
    accumulate_row(l0, sum[0]);
    accumulate_row(l1, sum[1]);
    accumulate_row(l2, sum[2]);
    accumulate_row(l3, sum[3]);
    accumulate_row(l4, sum[4]);
    accumulate_row(l5, sum[5]);
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRowsOfTile; ++i) {
    if (i >= rows) break;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm512_mask_storeu_ps(c + i * ldc + 16 * j, mask[j], sum[i][j]);
  }
}

}  // namespace

template <class T>
const char* Avx512Engine<T>::missing() {
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl")) {
    return std::is_same_v<T, float> ? "AVX-512" : "AVX-512 BF16";
  }
  if (std::is_same_v<T, Bf16> && !__builtin_cpu_supports("avx512bf16")) return "AVX-512 BF16";
  return nullptr;
}

template <class T>
std::size_t Avx512Engine<T>::scratch_bytes() {
  return (kLhsWords<T> + kRhsWords<T>)*sizeof(std::uint32_t);
}

template <class T>
void Avx512Engine<T>::lhs(Form form, std::int64_t m, std::int64_t k, Rows<T> rows) {
  lhs_ = rows;
  if (form == Form::tn) {
    // Packing stores 32 words at a time; kLhsColumns has room for m rounded up to 32.
    pack_k_rows(rows, k, 0, m, (m + 31) / 32 * 32, scratch_, kLhsColumns);
  }
}

template <class T>
void Avx512Engine<T>::rhs(Form form, std::int64_t n, std::int64_t k, Rows<T> rows) {
  std::uint32_t* panel = scratch_ + kLhsWords<T>;
  for (std::int64_t j = 0; j < n; j += kPanelColumns, panel += kPanelColumns * words_of<T>(k)) {
    const std::int64_t count = std::min<std::int64_t>(kPanelColumns, n - j);
    if (form == Form::nt) {
      pack_n_rows(rows, j, count, k, panel);
    } else {
      pack_k_rows(rows, k, j, count, kPanelColumns, panel, kPanelColumns);
    }
  }
}

template <class T>
void Avx512Engine<T>::multiply(Form form, std::int64_t m, std::int64_t n, std::int64_t k, float* c,
                               std::int64_t ldc, bool accumulate) {
  const std::int64_t words = words_of<T>(k);
  const std::uint32_t* panel = scratch_ + kLhsWords<T>;
  for (std::int64_t j = 0; j < n; j += kPanelColumns, panel += kPanelColumns * words) {
    for (std::int64_t i = 0; i < m; i += kRowsOfTile) {
      const int rows = static_cast<int>(std::min<std::int64_t>(kRowsOfTile, m - i));
      const char* left[kRowsOfTile];
      for (int r = 0; r < kRowsOfTile; ++r) {
        // Rows past the end repeat the last row. tile() does not store their sums.
        const std::int64_t row = i + std::min(r, rows - 1);
        left[r] = form == Form::tn ? reinterpret_cast<const char*>(scratch_ + row)
                                   : reinterpret_cast<const char*>(lhs_.row(row));
      }
      const std::int64_t step = form == Form::tn ? kLhsColumns * 4 : 4;
      tile<T>(left, step, panel, words, rows, n - j, c + i * ldc + j, ldc, accumulate);
    }
  }
}

template class Avx512Engine<float>;
template class Avx512Engine<Bf16>;

}  // namespace sonicmoe::cpu

#else  // not x86-64: the kernel list rejects these engines by missing() and calls nothing else

namespace sonicmoe::cpu {
template <class T>
const char* Avx512Engine<T>::missing() {
  return "AVX-512";
}
template <class T>
std::size_t Avx512Engine<T>::scratch_bytes() {
  return 0;
}
template <class T>
void Avx512Engine<T>::lhs(Form, std::int64_t, std::int64_t, Rows<T>) {}
template <class T>
void Avx512Engine<T>::rhs(Form, std::int64_t, std::int64_t, Rows<T>) {}
template <class T>
void Avx512Engine<T>::multiply(Form, std::int64_t, std::int64_t, std::int64_t, float*, std::int64_t,
                               bool) {}
template class Avx512Engine<float>;
template class Avx512Engine<math::Bf16>;
}  // namespace sonicmoe::cpu

#endif
