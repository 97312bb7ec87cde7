#include "cpu/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Layout of packed blocks, in 32-bit words that hold the bf16 of two consecutive k (low half first;
// an odd k ends with a zero):
//   left, tn only:  word[pair][m], m padded to kRowsOfTile
//   left, nt, nn:   not packed; the tile broadcasts words straight from the (gathered) rows, for a
//                   row's pairs are adjacent already
//   right:          panels of 64 columns: word[panel][pair][64], columns past n are zero
#define SONICMOE_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace sonicmoe::cpu {
namespace {

using math::Bf16;

constexpr int kRowsOfTile = 6;     // 6 x 4 registers of accumulators, 4 of the right panel, 1 left
constexpr int kPanelColumns = 64;  // 4 registers of 16 floats
constexpr std::int64_t kMaxPairs = kBlockK / 2;
constexpr std::int64_t kLhsColumns = (kBlockN + kRowsOfTile - 1) / kRowsOfTile * kRowsOfTile;
constexpr std::int64_t kLhsWords = kLhsColumns * kMaxPairs;
constexpr std::int64_t kRhsWords = kBlockN * kMaxPairs;

std::int64_t pairs_of(std::int64_t k) { return (k + 1) / 2; }

/// Words (a[j], b[j]) for j < 32 from two rows of bf16 held in registers.
SONICMOE_AVX512_BF16 inline void interleave(__m512i a, __m512i b, std::uint32_t* out) {
  // Take word halves: even positions from a, odd from b.
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
  _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(a, high, b));
}

SONICMOE_AVX512_BF16 inline __m512i load_row(const Bf16* row, std::int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(row);
  const __mmask32 mask = count <= 0 ? 0 : (__mmask32{1} << count) - 1;
  return _mm512_maskz_loadu_epi16(mask, row);
}

/// Rows along k (k x width) to words[pair][stride], `stride` a multiple of what is stored.
SONICMOE_AVX512_BF16 void pack_k_rows(Rows<Bf16> rows, std::int64_t k, std::int64_t column,
                                      std::int64_t width, std::int64_t padded, std::uint32_t* words,
                                      std::int64_t stride) {
  for (std::int64_t pair = 0; pair < pairs_of(k); ++pair) {
    const Bf16* even = rows.row(2 * pair) + column;
    const bool whole = 2 * pair + 1 < k;
    const Bf16* odd = whole ? rows.row(2 * pair + 1) + column : even;
    std::uint32_t* out = words + pair * stride;
    for (std::int64_t j = 0; j < padded; j += 32) {
      const __m512i a = load_row(even + j, width - j);
      const __m512i b = whole ? load_row(odd + j, width - j) : _mm512_setzero_si512();
      interleave(a, b, out + j);
    }
  }
}

/// Transposes 16 x 16 words: row i of the result holds word i of each input row.
SONICMOE_AVX512_BF16 inline void transpose16(__m512i (&r)[16]) {
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

/// Rows along n (n x k, k even) to one panel words[pair][64]; rows past `count` are zero.
SONICMOE_AVX512_BF16 void pack_n_rows(Rows<Bf16> rows, std::int64_t first, std::int64_t count,
                                      std::int64_t k, std::uint32_t* panel) {
  const std::int64_t pairs = pairs_of(k);
  for (std::int64_t j = 0; j < kPanelColumns; j += 16) {
    for (std::int64_t pair = 0; pair < pairs; pair += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) {
        r[i] = j + i < count ? load_row(rows.row(first + j + i) + 2 * pair, k - 2 * pair)
                             : _mm512_setzero_si512();
      }
      transpose16(r);
      const std::int64_t valid = std::min<std::int64_t>(16, pairs - pair);
      for (std::int64_t i = 0; i < valid; ++i) {
        _mm512_storeu_si512(panel + (pair + i) * kPanelColumns + j, r[i]);
      }
    }
  }
}

/// One tile: `rows` (<= 6) x 64 columns, of which `columns` are stored. left[i] points at row i's
/// first word, `step` is the distance between its pairs in bytes.
SONICMOE_AVX512_BF16 void tile(const char* const (&left)[kRowsOfTile], std::int64_t step,
                               const std::uint32_t* panel, std::int64_t pairs, int rows,
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
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    __m512bh b[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      b[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + 16 * j));
    }
    panel += kPanelColumns;
    const auto accumulate_row = [&](const char*& l, __m512(&row)[4]) SONICMOE_AVX512_BF16
        __attribute__((always_inline)) {
      int word;
      __builtin_memcpy(&word, l, 4);
      const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
      l += step;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) row[j] = _mm512_dpbf16_ps(row[j], a, b[j]);
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

bool Bf16Engine::usable() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

std::size_t Bf16Engine::scratch_bytes() { return (kLhsWords + kRhsWords) * sizeof(std::uint32_t); }

void Bf16Engine::lhs(Form form, std::int64_t m, std::int64_t k, Rows<Bf16> rows) {
  lhs_ = rows;
  if (form == Form::tn) {
    // 32 words at a time: the row of words is rounded up to that and has room for it.
    pack_k_rows(rows, k, 0, m, (m + 31) / 32 * 32, scratch_, kLhsColumns);
  }
}

void Bf16Engine::rhs(Form form, std::int64_t n, std::int64_t k, Rows<Bf16> rows) {
  std::uint32_t* panel = scratch_ + kLhsWords;
  for (std::int64_t j = 0; j < n; j += kPanelColumns, panel += kPanelColumns * pairs_of(k)) {
    const std::int64_t count = std::min<std::int64_t>(kPanelColumns, n - j);
    if (form == Form::nt) {
      pack_n_rows(rows, j, count, k, panel);
    } else {
      pack_k_rows(rows, k, j, count, kPanelColumns, panel, kPanelColumns);
    }
  }
}

void Bf16Engine::multiply(Form form, std::int64_t m, std::int64_t n, std::int64_t k, float* c,
                          std::int64_t ldc, bool accumulate) {
  const std::int64_t pairs = pairs_of(k);
  const std::uint32_t* panel = scratch_ + kLhsWords;
  for (std::int64_t j = 0; j < n; j += kPanelColumns, panel += kPanelColumns * pairs) {
    for (std::int64_t i = 0; i < m; i += kRowsOfTile) {
      const int rows = static_cast<int>(std::min<std::int64_t>(kRowsOfTile, m - i));
      const char* left[kRowsOfTile];
      for (int r = 0; r < kRowsOfTile; ++r) {
        // Rows past the end repeat the last one; their sums are not stored.
        const std::int64_t row = i + std::min(r, rows - 1);
        left[r] = form == Form::tn ? reinterpret_cast<const char*>(scratch_ + row)
                                   : reinterpret_cast<const char*>(lhs_.row(row));
      }
      const std::int64_t step = form == Form::tn ? kLhsColumns * 4 : 4;
      tile(left, step, panel, pairs, rows, n - j, c + i * ldc + j, ldc, accumulate);
    }
  }
}

}  // namespace sonicmoe::cpu

#else  // no AVX-512 here: the kernel list says so, and nothing below is ever called

namespace sonicmoe::cpu {
bool Bf16Engine::usable() { return false; }
std::size_t Bf16Engine::scratch_bytes() { return 0; }
void Bf16Engine::lhs(Form, std::int64_t, std::int64_t, Rows<math::Bf16>) {}
void Bf16Engine::rhs(Form, std::int64_t, std::int64_t, Rows<math::Bf16>) {}
void Bf16Engine::multiply(Form, std::int64_t, std::int64_t, std::int64_t, float*, std::int64_t,
                          bool) {}
}  // namespace sonicmoe::cpu

#endif
