// Which tokens a rank sends to which ranks. One thread: a few operations a choice.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/backends.h"

namespace sonicmoe::cpu {
namespace {

/// Calls f(choice, rank, id, n) for every choice t K + k that its rank takes. `id` is that of the
/// expert among the rank's own. The rank has taken n choices of the same token before.
/// `taken` is P words of scratch.
template <class F>
void for_each_choice(const TokenDispatchDesc& d, const std::int32_t* ids, std::int32_t* taken,
                     F&& f) {
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    std::fill_n(taken, d.ranks, 0);
    for (std::int64_t choice = t * d.top_k; choice < (t + 1) * d.top_k; ++choice) {
      const std::int32_t id = ids[choice];
      if (id < 0 || id >= d.experts * d.ranks) continue;
      const std::int64_t rank = id / d.experts;
      if (taken[rank] == d.columns()) continue;
      f(choice, rank, static_cast<std::int32_t>(id % d.experts), taken[rank]++);
    }
  }
}

std::size_t workspace(const TokenDispatchDesc& d, const Exec&) {
  return static_cast<std::size_t>(2 * d.ranks) * 4;
}

Status run(const TokenDispatchDesc& d, const TokenDispatchArgs& a, void* memory,
           const Exec&) noexcept {
  auto* const taken = static_cast<std::int32_t*>(memory);
  std::int32_t* const next = taken + d.ranks;  // the next row of each rank
  std::int32_t* const pairs = a.numbers + d.ranks;
  std::fill_n(a.numbers, 2 * d.ranks, 0);
  for_each_choice(d, a.ids, taken, [&](std::int64_t, std::int64_t rank, std::int32_t, int n) {
    a.numbers[rank] += n == 0;
    ++pairs[rank];
  });
  a.numbers[2 * d.ranks] = static_cast<std::int32_t>(d.experts);
  a.numbers[2 * d.ranks + 1] = static_cast<std::int32_t>(d.tokens);

  std::int32_t packed = 0;
  for (std::int64_t rank = 0; rank < d.ranks; ++rank) {
    next[rank] = d.packed ? packed : static_cast<std::int32_t>(rank * d.tokens);
    packed += a.numbers[rank];
  }
  std::fill_n(a.row_tokens, d.rows(), 0);
  std::fill_n(a.token_rows, d.tokens * d.ranks, -1);
  std::fill_n(a.score_places, d.tokens * d.top_k, 0);
  const std::int64_t columns = d.columns();
  for (std::int64_t row = 0; row < d.rows(); ++row) {
    std::int32_t* const choices = a.choices + 2 * columns * row;
    std::fill_n(choices, columns, -1);
    std::fill_n(choices + columns, columns, 0);
  }
  for_each_choice(d, a.ids, taken,
                  [&](std::int64_t choice, std::int64_t rank, std::int32_t id, int n) {
                    const std::int64_t token = choice / d.top_k;
                    std::int32_t& row = a.token_rows[token * d.ranks + rank];
                    if (n == 0) row = next[rank]++;
                    a.row_tokens[row] = static_cast<std::int32_t>(token);
                    std::int32_t* const at = a.choices + 2 * columns * row + n;
                    *at = id;
                    std::memcpy(at + columns, a.scores + choice, 4);
                    a.score_places[choice] = static_cast<std::int32_t>(1 + columns * row + n);
                  });
  return {};
}

}  // namespace

const Kernel<TokenDispatchDesc> kTokenDispatch = {
    .op = "token_dispatch",
    .name = "cpu.token_dispatch",
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cpu
